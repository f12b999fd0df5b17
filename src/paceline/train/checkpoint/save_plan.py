"""What the ranks agree on before a checkpoint is written: that they have the same state, and who writes what of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import xxhash

from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import (
    CapturedObject,
    CapturedState,
    LocalRegion,
    OfferedRegion,
    cut,
    whole_of,
)
from paceline.train.checkpoint.format.manifest import Draft
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import Json, encode, of_rank
from paceline.train.checkpoint.host_disks import Disks, begin
from paceline.train.checkpoint.optimizers import Numbering, agreed, outline_of
from paceline.train.checkpoint.ownership import ByteRange, Offer, assign_bytes, assign_offers
from paceline.train.checkpoint.pytree import name_of, take_apart
from paceline.train.checkpoint.rank_channel import GroupChannel, SingleRank, decode_result, encode_result, fault_of
from paceline.train.checkpoint.training_state import TrainingState, capture, entries
from paceline.train.module_tensors import memory_of


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes, in which draft, and the plain values that it contributes.

    `disks` are None if all ranks share one.
    """

    draft: Draft
    held: Sequence[LocalRegion]
    values: dict[str, Json]
    disks: Disks | None = None


def plan_save(
    state: TrainingState,
    root: Root,
    step: int | None,
    talk: GroupChannel | SingleRank,
    disks: Disks | None = None,
    least_sequence: int = 0,
) -> SavePlan:
    """Returns what this rank has to write; every rank calls this. Nothing is copied yet.

    Args:
        disks: those of the hosts; None if all ranks share one.
        least_sequence: of the checkpoint; that of the first rank counts.

    Raises:
        CheckpointError: a rank's state cannot be saved, the ranks' states differ in their tensors, or there is no
            room; raised on every rank.
    """
    captured = CapturedState()
    digests: dict[str, str] = {}
    numberings = agreed_numberings(state, talk)

    def take() -> bytes:
        nonlocal captured
        captured = capture(state, talk.rank == 0, numberings)
        digests.update({name: _digest(name, each) for name, each in captured.objects.items()})
        for name, value in captured.values.items():
            encode(value, name)
        return b""

    fault = fault_of(encode_result(take, talk.me))
    facts = {
        "fault": fault,
        "step": step,
        "tensors": _described(captured),
        "offered": [_offer(each).packed() for each in captured.offered],
        "nbytes": sum(each.nbytes for each in captured.held),
        "objects": digests,
        "layers": captured.layers,
    }
    everyone = [json.loads(each) for each in talk.exchange(json.dumps(facts).encode())]
    _require_alike(everyone, talk.me)
    _require_all_layers([each["layers"] for each in everyone])
    _settle_objects(captured, [each["objects"] for each in everyone], talk.rank)
    offers = [[Offer.unpacked(each) for each in one["offered"]] for one in everyone]
    shares = assign_offers(offers, [each["nbytes"] for each in everyone])
    loads = [each["nbytes"] + _size(its) for each, its in zip(everyone, shares, strict=True)]
    tensors = list(captured.everywhere.items())
    dealt = assign_bytes([tensor.nbytes for _, tensor in tensors], loads)
    nbytes = [load + _size(its) for load, its in zip(loads, dealt, strict=True)]
    if disks is None:
        draft = agreed_draft(root, step, sum(nbytes), talk, least_sequence)
    else:
        draft = begin(root, step, nbytes, disks, talk, least_sequence)
    values = {name: encode(value, name) for name, value in captured.values.items()}
    own = [(captured.offered[item].held, start, stop) for item, start, stop in shares[talk.rank]]
    own += [(whole_of(*tensors[item]), start, stop) for item, start, stop in dealt[talk.rank]]
    held = [*captured.held, *(part for each in own for part in cut(*each))]
    return SavePlan(draft, held, values, disks)


def agreed_numberings(state: TrainingState, talk: GroupChannel | SingleRank) -> dict[str, Numbering]:
    """Returns the numberings of the optimizers of pipelines, by their names; every rank calls this.

    Raises:
        CheckpointError: a rank has other optimizers, or other groups; raised on every rank.
    """
    everyone = talk.exchange(encode_result(lambda: outline_of(entries(state)), talk.me))
    return agreed([decode_result(each) for each in everyone])


def agreed_draft(
    root: Root, step: int | None, nbytes: int, talk: GroupChannel | SingleRank, least_sequence: int = 0
) -> Draft:
    """Returns the draft that rank 0 begins.

    Raises:
        CheckpointError: it could not; raised on every rank.
    """
    answer = b""
    if talk.rank == 0:
        answer = encode_result(
            lambda: root.begin(step, nbytes=nbytes, least_sequence=least_sequence).to_bytes(), talk.me
        )
    return Draft.from_bytes(decode_result(talk.announce(answer)))


def _offer(offered: OfferedRegion) -> Offer:
    held = offered.held
    return Offer(held.name, held.dtype, held.shape, held.region, held.nbytes, offered.of_first)


def _described(captured: CapturedState) -> list[list[Any]]:
    return [[name, name_of(each.dtype), list(each.shape)] for name, each in captured.everywhere.items()]


def _digest(name: str, one: CapturedObject) -> str:
    total = xxhash.xxh3_128(json.dumps(encode(one.value, name), sort_keys=True).encode())
    for tensor in one.tensors.values():
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(memory_of(tensor))
    return total.hexdigest()


def _require_alike(everyone: Sequence[dict[str, Any]], me: str) -> None:
    faults = [each["fault"] for each in everyone if each["fault"] is not None]
    if faults:
        raise CheckpointError(f"the checkpoint cannot be saved: {faults[0]}")
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["step"] != first["step"]:
            raise CheckpointError(
                f"{me}: rank 0 of the group saves step {first['step']}, rank {rank} saves step {other['step']}; every "
                "rank must call save in the same step"
            )
        if other["tensors"] != first["tensors"]:
            raise CheckpointError(
                f"{me}: the ranks' states differ: {_first_difference(first['tensors'], other['tensors'], rank)}. Every "
                "rank must save the same modules and optimizers"
            )


def _require_all_layers(everyone: Sequence[Mapping[str, tuple[Sequence[str], int]]]) -> None:
    for name in everyone[0]:
        having = [each[name][0] if name in each else [] for each in everyone]
        found, total = set(chain.from_iterable(having)), everyone[0][name][1]
        if len(found) != total:
            raise CheckpointError(
                f"the {len(everyone)} ranks that save have {len(found)} of the {total} layers of the pipeline "
                f"{name!r}; all ranks of the mesh must save together"
            )


def _first_difference(first: list[list[Any]], other: list[list[Any]], rank: int) -> str:
    ours, theirs = ({name: f"{dtype}{shape}" for name, dtype, shape in each} for each in (first, other))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            seen, expected = theirs.get(name, "no such tensor"), ours.get(name, "no such tensor")
            return f"rank 0 of the group has {name!r} as {expected}, rank {rank} has {seen}"
    return f"rank {rank} of the group has the same tensors as rank 0 in another order"


def _settle_objects(captured: CapturedState, digests: Sequence[Mapping[str, str]], rank: int) -> None:
    """Decides for each object whether its state is one for all, or this rank's own.

    Args:
        digests: what each rank has, by name.
    """
    for name, one in captured.objects.items():
        having = [each for each, known in enumerate(digests) if name in known]
        is_alike = len({digests[each][name] for each in having}) == 1
        if is_alike and not one.is_everywhere:
            captured.values[name] = one.value
            if rank == having[0]:
                captured.held += [whole_of(each, tensor) for each, tensor in one.tensors.items()]
            continue
        if is_alike and len(having) == len(digests):
            captured.everywhere.update({each: tensor.detach() for each, tensor in one.tensors.items()})
            if not (len(one.tensors) == 1 and name in one.tensors):
                captured.values[name] = one.value
            continue
        own, tensors = of_rank(name, rank), dict[str, Any]()
        captured.values[own] = take_apart(own, one.state, tensors)
        captured.held += [whole_of(each, tensor) for each, tensor in tensors.items()]


def _size(shares: Sequence[ByteRange]) -> int:
    return sum(share.stop - share.start for share in shares)
