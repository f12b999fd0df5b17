"""Checks, before training starts, that every rank wraps the same model in the same way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.errors import CollectiveMismatchError
from paceline.group.process_group import ProcessGroup
from paceline.parallel.tracked_tensors import TrackedTensors
from paceline.wording import and_more

Entry = list[object]


@dataclass(frozen=True)
class RankFacts:
    """What a rank reports about itself to all ranks.

    Attributes:
        overlaps: whether it was told to overlap reduction with backward, or can since its tensors are on a GPU; None if
            that depends on the cores.
        host: the name of its host.
        local_ranks: how many ranks its host has, those of other groups too; 0 if it does not know.
        cores: those that it may run on.
        quota: how many cores' time its cgroup gets; 0 for no limit.
        cgroup: which cgroup that is.
        threads: torch's threads.
    """

    overlaps: bool | None
    host: str
    local_ranks: int
    cores: list[int]
    quota: float
    cgroup: int
    threads: int


def describe_tensors(tracked: TrackedTensors) -> list[Entry]:
    """Returns the name, shape, strides, dtype, device type and requires_grad of each parameter and buffer."""
    described: list[Entry] = []
    for kind, named in (("parameter", tracked.trained | tracked.frozen), ("buffer", tracked.buffers)):
        for name, tensor in named.items():
            shape = list(tensor.shape)
            where = "" if tensor.is_cpu else f" on {tensor.device.type}"
            described.append([kind, name, shape, list(tensor.stride()), f"{tensor.dtype}{where}", tensor.requires_grad])
    return described


def require_same_module(
    tracked: TrackedTensors,
    options: dict[str, object],
    facts: RankFacts,
    problem: Exception | None,
    group: ProcessGroup,
) -> list[RankFacts]:
    """Compares the model, and the options it is wrapped with, over the ranks; returns every rank's facts.

    Args:
        tracked: the tensors of the module that this rank wraps.
        options: arguments that must be the same on every rank.
        facts: what this rank reports about itself.
        problem: why this rank cannot wrap its module; it is raised here, after the other ranks have received it.

    Raises:
        CollectiveMismatchError: on every rank, naming the first difference and which ranks are on which side of it.
    """
    description = [] if problem is not None else describe_tensors(tracked)
    digest = hashlib.blake2b(json.dumps(description).encode(), digest_size=16).hexdigest()
    mine: dict[str, object] = {"digest": digest, "options": options, "facts": asdict(facts)}
    mine["problem"] = str(problem) if problem else None
    everyone = [json.loads(data) for data in group.all_gather_bytes(json.dumps(mine).encode())]
    if problem is not None:
        raise problem
    for rank, other in zip(group.ranks, everyone, strict=True):
        if other["problem"] is not None:
            raise CollectiveMismatchError(
                f"rank {group.me.rank}: rank {rank} could not wrap its module, so no rank can: "
                f"{other['problem']}. Build the same model on every rank and wrap it the same way"
            )
    for option, value in options.items():
        values = [other["options"].get(option) for other in everyone]
        if any(each != value for each in values):
            told = _sides([f"{option}={each!r}" for each in values], group.ranks)
            raise CollectiveMismatchError(
                f"rank {group.me.rank}: the module is not wrapped alike: {told}. Pass the same arguments on every rank"
            )
    if any(other["digest"] != digest for other in everyone):
        descriptions = [json.loads(data) for data in group.all_gather_bytes(json.dumps(description).encode())]
        raise CollectiveMismatchError(
            f"rank {group.me.rank}: the models differ: {_first_difference(descriptions, group.ranks)}. "
            "Build the same model on every rank (same arguments, same order of layers) before wrapping it"
        )
    return [RankFacts(**other["facts"]) for other in everyone]


def _first_difference(descriptions: Sequence[list[Entry]], ranks: Sequence[int]) -> str:
    for at in range(max(map(len, descriptions))):
        said = [_say(entries[at] if at < len(entries) else None) for entries in descriptions]
        if any(each != said[0] for each in said):
            return _sides(said, ranks)
    raise AssertionError("descriptions whose digests differ are equal")


def _sides(values: Sequence[str], ranks: Sequence[int], most: int = 8) -> str:
    """Returns text that says which ranks hold which value, beginning with rank 0's."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    told = []
    for value, who in holders.items():
        listed = and_more(who, most)
        told.append(f"rank{'s' if len(who) > 1 else ''} {listed}: {value}")
    return "; ".join(told)


def _say(entry: Entry | None) -> str:
    if entry is None:
        return "nothing in its place"
    kind, name, shape, stride, dtype, requires_grad = entry
    return f"{kind} {name!r} of shape {shape}, strides {stride}, {dtype}, requires_grad={requires_grad}"
