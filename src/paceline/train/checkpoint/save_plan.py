"""SavePlan: a rank's part of a save. The ranks compare their states, and assign each byte to a rank that writes it.

Planning neither copies nor writes data, except that rank 0 creates the draft's directory. Each rank describes its state
in a `RankReport`, and all ranks compute the same assignment from these reports.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import CapturedState, TrainingState, capture, entries
from paceline.train.checkpoint.format.manifest import Draft
from paceline.train.checkpoint.format.regions import Region, untiled
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import Json, encode, of_rank
from paceline.train.checkpoint.host_disks import Disks, begin
from paceline.train.checkpoint.optimizers import Numbering, Outline, agreed, outline_of
from paceline.train.checkpoint.pytree import name_of, take_apart
from paceline.train.checkpoint.rank_channel import CollectiveChannel, encode_result, exchanged, fault_of
from paceline.train.checkpoint.shard_layout import LocalRegion, cut, whole_of
from paceline.train.checks.device_values import DeviceDigests
from paceline.train.module_tensors import memory_of


@dataclass(frozen=True)
class SavePlan:
    """The part of a checkpoint that this rank writes: tensor regions and plain values.

    `disks` is None if all ranks share one disk.
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
        objects: the digests of objects, modules and optimizers that may differ between ranks, by name.
        layers: the names of the rank's layers and the total number of layers, by pipeline name.
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
    disks: Disks | None,
    least_sequence: int = 0,
) -> SavePlan:
    """Returns this rank's plan and begins the checkpoint; every rank must call this.

    `least_sequence` is the smallest sequence number that the checkpoint may have. If all ranks share one disk, rank 0's
    value is used; otherwise, the largest value on any rank is used. If a rank's state cannot be saved, the ranks'
    tensors differ, or there is too little space, CheckpointError is raised on every rank.
    """
    captured = CapturedState()
    digests: dict[str, str] = {}
    numberings = agreed_numberings(state, channel)

    def take() -> None:
        nonlocal captured
        captured = capture(state, channel.rank == 0, numberings)
        digests.update(_digests_of(captured, has_others=channel.size > 1))
        for name, value in captured.values.items():
            encode(value, name)

    fault = fault_of(encode_result(take, channel.me))
    report = RankReport(
        fault=fault,
        step=step,
        tensors=[
            (name, name_of(tensor.dtype), list(tensor.shape))
            for state in (captured, *(replica.state for replica in captured.replicas.values()))
            for name, tensor in state.everywhere.items()
        ],
        offered=[
            Offer(held.name, held.dtype, held.shape, held.region, held.nbytes, held.of_first)
            for held in captured.offered
        ],
        nbytes=sum(held.nbytes for held in captured.held),
        objects=digests,
        layers=captured.layers,
    )
    reports = [msgspec.json.decode(data, type=RankReport) for data in channel.all_gather(msgspec.json.encode(report))]
    _require_alike(reports, channel.me)
    _require_all_layers(reports)
    _settle_replicas(captured, [report.objects for report in reports], channel)
    _settle_objects(captured, [report.objects for report in reports], channel.rank)
    offered = assign_offers([report.offered for report in reports], [report.nbytes for report in reports])
    loads = [report.nbytes + _size(ranges) for report, ranges in zip(reports, offered, strict=True)]
    tensors = list(captured.everywhere.items())
    shared = assign_bytes([tensor.nbytes for _, tensor in tensors], loads)
    nbytes = [load + _size(ranges) for load, ranges in zip(loads, shared, strict=True)]
    draft = begin(root, step, nbytes, disks, channel, least_sequence)
    values = {name: encode(value, name) for name, value in captured.values.items()}
    own = [(captured.offered[item], start, stop) for item, start, stop in offered[channel.rank]]
    own += [(whole_of(*tensors[item]), start, stop) for item, start, stop in shared[channel.rank]]
    held = [*captured.held, *chain.from_iterable(cut(*share) for share in own)]
    return SavePlan(draft, held, values, disks)


def agreed_numberings(state: TrainingState, channel: CollectiveChannel) -> dict[str, Numbering]:
    """Returns the numberings of the pipeline optimizers, by name; every rank must call this."""
    return agreed(exchanged(lambda: outline_of(entries(state)), Outline, channel))


def _digests_of(captured: CapturedState, *, has_others: bool) -> dict[str, str]:
    """Returns the digests of everything that may differ between ranks, by name.

    Each tensor is hashed on its device. If there are no other ranks, tensors are not hashed.
    """
    on_devices = DeviceDigests()
    of_tensors: dict[str, dict[str, int]] = {}

    def add(name: str, values: object, tensors: Mapping[str, torch.Tensor]) -> None:
        total = xxhash.xxh3_128(json.dumps(encode(values, name), sort_keys=True).encode())
        of_tensors[name] = {}
        for full, tensor in tensors.items() if has_others else ():
            total.update(f"{full}{tensor.dtype}{tuple(tensor.shape)}".encode())
            if tensor.is_cpu:
                total.update(memory_of(tensor))
            else:
                on_devices.add(of_tensors[name], full, tensor)
        totals[name] = total

    totals: dict[str, xxhash.xxh3_128] = {}
    for name, replica in captured.replicas.items():
        add(name, replica.state.values, replica.state.everywhere)
        for inner, known in replica.state.objects.items():
            add(inner, known.value, known.tensors)
    for name, known in captured.objects.items():
        add(name, known.value, known.tensors)
    on_devices.read()
    for name, total in totals.items():
        total.update(repr(of_tensors[name]).encode())
    return {name: total.hexdigest() for name, total in totals.items()}


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


def _settle_replicas(captured: CapturedState, digests: Sequence[Mapping[str, str]], channel: CollectiveChannel) -> None:
    """Decides for each module or optimizer whether to save one state for all ranks or a separate state for each rank.

    The states are added to `captured`, and rank 0 warns if they differ. `digests` contains each rank's digests, by
    name.
    """
    differing = []
    for name, replica in captured.replicas.items():
        if len({known.get(name) for known in digests}) == 1:
            captured.add_state(replica.state)
        else:
            captured.hold_state(replica.capture_own(of_rank(name, channel.rank)))
            differing.append(name)
    if differing and channel.rank == 0:
        warnings.warn(
            f"{channel.me}: the ranks have different values in {' and '.join(map(repr, differing))}, so the checkpoint "
            "contains a copy for each rank. If the ranks train one model together, wrap it in DistributedDataParallel "
            "before the first step",
            stacklevel=4,
        )


def _settle_objects(captured: CapturedState, digests: Sequence[Mapping[str, str]], rank: int) -> None:
    """Decides for each object whether to save one state for all ranks or a separate state for each rank."""
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


ALIGNMENT_NBYTES = 1 << 20  # alignment of cuts within a tensor; smaller tensors are not cut


class ByteRange(NamedTuple):
    """The bytes of item number `item` from `start` (inclusive) to `stop` (exclusive)."""

    item: int
    start: int
    stop: int


def assign_bytes(
    sizes: Sequence[int], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Assigns each byte of the items to exactly one rank, such that all ranks have about the same total.

    Each rank computes the same assignment from the same numbers, without communication. The items are concatenated, and
    are cut between items, or at multiples of `alignment` bytes within an item. Each empty item is also assigned to one
    rank. `sizes` and `loads`, which contains what each rank already has, are in bytes.

    >>> assign_bytes([4, 8], [0, 0], alignment=2)  # doctest: +NORMALIZE_WHITESPACE
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=2)],
     [ByteRange(item=1, start=2, stop=8)]]
    >>> assign_bytes([4, 8], [0, 12], alignment=2)
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=8)], []]
    """
    limits = list(accumulate(_quotas(sum(sizes), loads)))
    assigned: list[list[ByteRange]] = [[] for _ in loads]
    rank = first = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size or size == 0:
            while rank + 1 < len(loads) and first + start >= limits[rank]:
                rank += 1
            stop = size if rank + 1 == len(loads) else _cut(limits[rank] - first, size, alignment)
            if stop > start or size == 0:
                assigned[rank].append(ByteRange(index, start, stop))
            elif rank + 1 < len(loads):
                rank += 1
            start = max(start, stop)
            if size == 0:
                break
        first += size
    return assigned


def _cut(wanted: int, size: int, alignment: int) -> int:
    """Returns the offset nearest to `wanted` at which an item can be cut."""
    if wanted >= size:
        return size
    cut = (wanted + alignment // 2) // alignment * alignment
    return size if cut >= size or (size <= alignment and 2 * wanted >= size) else cut


def _quotas(total: int, loads: Sequence[int]) -> list[int]:
    """Divides `total` bytes among the ranks such that the largest resulting load is as small as possible.

    >>> _quotas(6, [0, 4, 20])
    [5, 1, 0]
    """
    sharing = sorted(range(len(loads)), key=lambda rank: loads[rank])
    while sharing:
        level = (total + sum(loads[rank] for rank in sharing)) / len(sharing)
        if loads[sharing[-1]] <= level:
            break
        sharing.pop()
    quotas = [0] * len(loads)
    for rank in sharing:
        quotas[rank] = round(level) - loads[rank]
    return quotas


@dataclass(frozen=True)
class Offer:
    """A region of a tensor that a rank has and other ranks may also have; see `LocalRegion`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    nbytes: int
    of_first: bool


def assign_offers(
    offers: Sequence[Sequence[Offer]], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Assigns the bytes of offered regions to the ranks that offer them.

    Regions that few ranks have are assigned first, so that regions that many ranks have can balance the loads, which
    are the bytes that each rank must write in any case.

    Returns:
        For each rank, the ranges that it writes; `item` is the index of an offer in the rank's list.
    """
    _require_fit(offers)
    holders: dict[tuple[str, Region], list[tuple[int, int]]] = {}
    for rank, own in enumerate(offers):
        for index, offer in enumerate(own):
            known = holders.setdefault((offer.name, offer.region), [])
            if not (offer.of_first and known):
                known.append((rank, index))
    by_ranks: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    for held in holders.values():
        by_ranks.setdefault(tuple(rank for rank, _ in held), []).append(held)
    totals, assigned = list(loads), [list[ByteRange]() for _ in offers]
    for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
        regions = by_ranks[ranks]
        sizes = [offers[held[0][0]][held[0][1]].nbytes for held in regions]
        for member, ranges in enumerate(assign_bytes(sizes, [totals[rank] for rank in ranks], alignment)):
            for item, start, stop in ranges:
                rank, index = regions[item][member]
                assigned[rank].append(ByteRange(index, start, stop))
                totals[rank] += stop - start
    return assigned


def _require_fit(offers: Sequence[Sequence[Offer]]) -> None:
    first: dict[str, tuple[int, Offer]] = {}
    regions: dict[str, dict[Region, int]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            before, known = first.setdefault(offer.name, (rank, offer))
            if (known.dtype, known.shape) != (offer.dtype, offer.shape):
                raise CheckpointError(
                    f"rank {before} of the group has a part of {offer.name!r} as {known.dtype}{list(known.shape)}, "
                    f"rank {rank} has one as {offer.dtype}{list(offer.shape)}; every rank must save its part of the "
                    "same model"
                )
            regions.setdefault(offer.name, {}).setdefault(offer.region, rank)
    for name, ranks_of in regions.items():
        if (fault := untiled(first[name][1].shape, list(ranks_of))) is not None:
            ranks = ", ".join(map(str, sorted(set(ranks_of.values()))))
            raise CheckpointError(
                f"the parts of {name!r} on the ranks {ranks} of the group do not add up to the whole: {fault}. All "
                "ranks of the mesh must save together, and divide the model in the same way"
            )
