"""SavePlan: a rank's part of a save. The ranks compare their states, and assign each byte to a rank that writes it.

Planning copies and writes no data, except that rank 0 creates the draft's directory. Each rank describes its state in a
`RankReport`, and all ranks compute the same assignment from these reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import xxhash

from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import CapturedObject, CapturedState, LocalRegion, cut, whole_of
from paceline.train.checkpoint.format.manifest import Draft
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import Json, encode, of_rank
from paceline.train.checkpoint.host_disks import Disks, begin
from paceline.train.checkpoint.optimizers import Numbering, agreed, outline_of
from paceline.train.checkpoint.ownership import ByteRange, Offer, assign_bytes, assign_offers
from paceline.train.checkpoint.pytree import name_of, take_apart
from paceline.train.checkpoint.rank_channel import CollectiveChannel, result_of_first, results_of_all
from paceline.train.checkpoint.rank_results import encode_result, fault_of
from paceline.train.checkpoint.training_state import TrainingState, capture, entries
from paceline.train.module_tensors import memory_of


@dataclass(frozen=True)
class SavePlan:
    """The part of a checkpoint that this rank writes.

    Attributes:
        draft: the checkpoint that is being written.
        held: the tensor regions that this rank writes.
        values: the plain values that this rank contributes.
        disks: the disks of the hosts, or None if all ranks share one. Default: None.
    """

    draft: Draft
    held: Sequence[LocalRegion]
    values: dict[str, Json]
    disks: Disks | None = None


@dataclass(frozen=True)
class RankReport:
    """A rank's report to the others before a save.

    Attributes:
        fault: the reason why the rank's state cannot be saved, or None.
        step: the step that the rank saves.
        tensors: the name, dtype and shape of each tensor that every rank has.
        offered: the tensor regions that several ranks may have.
        nbytes: the number of bytes that only this rank has.
        objects: the digests of objects that may differ between ranks, by name.
        layers: for each pipeline, by name, the names of the rank's layers and the total number of layers.
    """

    fault: str | None
    step: int | None
    tensors: list[tuple[str, str, list[int]]]
    offered: list[Offer]
    nbytes: int
    objects: dict[str, str]
    layers: dict[str, tuple[list[str], int]]


def plan_save(
    state: TrainingState,
    root: Root,
    step: int | None,
    channel: CollectiveChannel,
    disks: Disks | None = None,
    least_sequence: int = 0,
) -> SavePlan:
    """Returns this rank's plan and begins the checkpoint; every rank calls this.

    Args:
        disks: the disks of the hosts, or None if all ranks share one. Default: None.
        least_sequence: the smallest sequence number that the checkpoint may get. If all ranks share one disk, rank 0's
            value is used, else the largest value of any rank. Default: 0.

    Raises:
        CheckpointError: a rank's state cannot be saved, the ranks' tensors differ, or there is too little space; raised
            on every rank.
    """
    captured = CapturedState()
    digests: dict[str, str] = {}
    numberings = agreed_numberings(state, channel)

    def take() -> bytes:
        nonlocal captured
        captured = capture(state, channel.rank == 0, numberings)
        digests.update({name: _digest(name, captured_object) for name, captured_object in captured.objects.items()})
        for name, value in captured.values.items():
            encode(value, name)
        return b""

    fault = fault_of(encode_result(take, channel.me))
    report = RankReport(
        fault=fault,
        step=step,
        tensors=[(name, name_of(tensor.dtype), list(tensor.shape)) for name, tensor in captured.everywhere.items()],
        offered=[
            Offer(held.name, held.dtype, held.shape, held.region, held.nbytes, of_first)
            for held, of_first in captured.offered
        ],
        nbytes=sum(held.nbytes for held in captured.held),
        objects=digests,
        layers=captured.layers,
    )
    reports = [msgspec.json.decode(data, type=RankReport) for data in channel.all_gather(msgspec.json.encode(report))]
    _require_alike(reports, channel.me)
    _require_all_layers(reports)
    _settle_objects(captured, [report.objects for report in reports], channel.rank)
    offered = assign_offers([report.offered for report in reports], [report.nbytes for report in reports])
    loads = [report.nbytes + _size(ranges) for report, ranges in zip(reports, offered, strict=True)]
    tensors = list(captured.everywhere.items())
    shared = assign_bytes([tensor.nbytes for _, tensor in tensors], loads)
    nbytes = [load + _size(ranges) for load, ranges in zip(loads, shared, strict=True)]
    if disks is None:
        draft = _begin_on_one(root, step, sum(nbytes), channel, least_sequence)
    else:
        draft = begin(root, step, nbytes, disks, channel, least_sequence)
    values = {name: encode(value, name) for name, value in captured.values.items()}
    own = [(captured.offered[item].held, start, stop) for item, start, stop in offered[channel.rank]]
    own += [(whole_of(*tensors[item]), start, stop) for item, start, stop in shared[channel.rank]]
    held = [*captured.held, *chain.from_iterable(cut(*share) for share in own)]
    return SavePlan(draft, held, values, disks)


def agreed_numberings(state: TrainingState, channel: CollectiveChannel) -> dict[str, Numbering]:
    """Returns the numberings of the pipeline optimizers, by name; every rank calls this.

    Raises:
        CheckpointError: the ranks' optimizers or parameter groups differ; raised on every rank.
    """
    return agreed(results_of_all(lambda: outline_of(entries(state)), channel))


def _begin_on_one(root: Root, step: int | None, nbytes: int, channel: CollectiveChannel, least_sequence: int) -> Draft:
    """Begins a checkpoint, on rank 0, on the disk that all ranks share; returns its draft on every rank."""
    return Draft.from_bytes(
        result_of_first(lambda: root.begin(step, nbytes=nbytes, least_sequence=least_sequence).to_bytes(), channel)
    )


def _digest(name: str, captured: CapturedObject) -> str:
    total = xxhash.xxh3_128(json.dumps(encode(captured.value, name), sort_keys=True).encode())
    for tensor in captured.tensors.values():
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(memory_of(tensor))
    return total.hexdigest()


def _require_alike(reports: Sequence[RankReport], me: str) -> None:
    faults = [report.fault for report in reports if report.fault is not None]
    if faults:
        raise CheckpointError(f"the checkpoint cannot be saved: {faults[0]}")
    first = reports[0]
    for rank, other in enumerate(reports):
        if other.step != first.step:
            raise CheckpointError(
                f"{me}: rank 0 of the group saves step {first.step}, rank {rank} saves step {other.step}; every "
                "rank must call save in the same step"
            )
        if other.tensors != first.tensors:
            raise CheckpointError(
                f"{me}: the ranks' states differ: {_first_difference(first, other, rank)}. Every rank must save the "
                "same modules and optimizers"
            )


def _first_difference(first: RankReport, other: RankReport, rank: int) -> str:
    ours, theirs = ({name: f"{dtype}{shape}" for name, dtype, shape in report.tensors} for report in (first, other))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            seen, expected = theirs.get(name, "no such tensor"), ours.get(name, "no such tensor")
            return f"rank 0 of the group has {name!r} as {expected}, rank {rank} has {seen}"
    return f"rank {rank} of the group has the same tensors as rank 0 in another order"


def _require_all_layers(reports: Sequence[RankReport]) -> None:
    for name, (_, total) in reports[0].layers.items():
        found = set(chain.from_iterable(report.layers[name][0] for report in reports if name in report.layers))
        if len(found) != total:
            raise CheckpointError(
                f"the {len(reports)} ranks that save have {len(found)} of the {total} layers of the pipeline "
                f"{name!r}; all ranks of the mesh must save together"
            )


def _settle_objects(captured: CapturedState, digests: Sequence[Mapping[str, str]], rank: int) -> None:
    """Decides for each object whether to save one state for all ranks or a separate state for each rank.

    Args:
        captured: the state of this rank, to which the objects' values and tensors are added.
        digests: the digests of each rank's objects, by name.
    """
    for name, known in captured.objects.items():
        having = [other for other, its in enumerate(digests) if name in its]
        is_alike = len({digests[other][name] for other in having}) == 1
        if is_alike and not known.is_everywhere:
            captured.values[name] = known.value
            if rank == having[0]:
                captured.held += [whole_of(full, tensor) for full, tensor in known.tensors.items()]
            continue
        if is_alike and len(having) == len(digests):
            captured.everywhere.update({full: tensor.detach() for full, tensor in known.tensors.items()})
            if not (len(known.tensors) == 1 and name in known.tensors):
                captured.values[name] = known.value
            continue
        own, tensors = of_rank(name, rank), dict[str, Any]()
        captured.values[own] = take_apart(own, known.state, tensors)
        captured.held += [whole_of(full, tensor) for full, tensor in tensors.items()]


def _size(ranges: Sequence[ByteRange]) -> int:
    return sum(share.stop - share.start for share in ranges)
