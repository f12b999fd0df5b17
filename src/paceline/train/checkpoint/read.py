"""Reads tensor regions from a checkpoint, as requested by the ranks.

A `LoadPlan` collects a rank's requests. `fill` reads from a disk that all ranks share: regions requested by all ranks
are
read once and broadcast, and each rank reads its other regions itself. `fetch` reads from the disks of several hosts:
each rank reads the files on its own disk, and receives other files' contents from ranks that can read them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import xxhash

from paceline.comm.engine.channel import byte_view
from paceline.comm.group.buffers import count_writes, is_plain
from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import BLOCK_NBYTES
from paceline.train.checkpoint.format.regions import Flat, Region, copies, count, count_common, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE
from paceline.train.checkpoint.format.values import SEPARATOR, TensorRef, decode, first_key, of_rank, unescaped
from paceline.train.checkpoint.host_disks import AbsentCheckpoint
from paceline.train.checkpoint.pytree import copying_into, memory_with, put_together, type_of
from paceline.train.checkpoint.rank_channel import (
    CollectiveChannel,
    GroupChannel,
    SingleRank,
    encode_result,
    exchanged,
    is_success,
    require_success,
    results_of_all,
)

_AFTER_SEPARATOR = chr(ord(SEPARATOR) + 1)
_EXCHANGED_AT_ONCE_NBYTES = 64 << 20  # maximum size of a message, unless a single piece is larger
_BROADCAST_AT_ONCE_NBYTES = 256 << 20  # size above which a broadcast is split into several calls


@dataclass(frozen=True)
class ReadItem:
    """A request to read a region of a tensor into `memory`, a contiguous CPU tensor with the saved dtype.

    If `by_all` is set, every rank requests the same region, so one rank reads it and sends it to the others.
    """

    name: str
    region: Region
    memory: torch.Tensor
    by_all: bool


class LoadPlan:
    """Collects a rank's requests, and the finalizers that `finish` calls once everything has been read."""

    def __init__(self, checkpoint: Checkpoint | AbsentCheckpoint, rank: int) -> None:
        self.checkpoint = checkpoint
        self.tensors = checkpoint.manifest.tensors
        if not isinstance(checkpoint.manifest.values, dict):
            raise CheckpointError(f"{checkpoint.describe()} was not saved by paceline.save: its values have no names")
        self.values = checkpoint.manifest.values
        self.items: list[ReadItem] = []
        self._names = sorted({*self.tensors, *self.values})
        self._rank = rank
        self._finalizers: list[Callable[[], None]] = []

    def names_below(self, name: str) -> dict[str, str]:
        """Returns the names of the tensors and values below `name`, keyed by the rest of each name."""
        first, stop = (bisect.bisect_left(self._names, name + end) for end in (SEPARATOR, _AFTER_SEPARATOR))
        return {full[len(name) + 1 :]: full for full in self._names[first:stop]}

    def has(self, name: str) -> bool:
        """Returns True if the checkpoint has a tensor or value with this name or below this name."""
        return any(map(self._has_exactly, self._candidates(name)))

    def own_name(self, name: str) -> str:
        """Returns the name under which this rank's copy is saved: `name`, unless each rank saved its own copy.

        If this rank saved no copy, the name of rank 0's copy is returned.
        """
        return next(filter(self._has_exactly, self._candidates(name)), name)

    def _has_exactly(self, full: str) -> bool:
        return full in self.tensors or full in self.values or bool(self.names_below(full))

    def top_names(self) -> list[str]:
        """Returns the top-level names of the saved state."""
        return sorted(set(map(first_key, self._names)))

    def add_finalizer(self, work: Callable[[], None]) -> None:
        """Adds a function that `finish` calls."""
        self._finalizers.append(work)

    def finish(self) -> None:
        """Calls the finalizers, in order, once everything has been read."""
        count_writes(item.memory for item in self.items)
        for work in self._finalizers:
            work()

    def into(
        self,
        name: str,
        target: torch.Tensor,
        *,
        shape: tuple[int, ...] | None = None,
        region: Region | None = None,
        by_all: bool = True,
    ) -> None:
        """Requests that a tensor, or a region of it, be read into `target`.

        If each rank saved its own tensor, this rank's tensor is read, or rank 0's tensor if this rank saved none.

        Args:
            target: the destination, with any dtype and on any device.
            shape: the shape of the whole tensor, or None for the shape of `target`.
            region: the region, or None for the whole tensor.
            by_all: whether all ranks request the same region. Ignored if each rank saved its own tensor. Default: True.
        """
        known = next((full for full in self._candidates(name) if full in self.tensors), None)
        if known is None:
            raise CheckpointError(
                f"{name!r} is a tensor here, and something else in {self.checkpoint.describe()}; load it into an "
                "object of the saved type, or into None to get the saved value"
            )
        saved = self.tensors[known]
        by_all = by_all and known == name
        shape = tuple(target.shape) if shape is None else shape
        region = whole(shape) if region is None else region
        if shape != saved.shape:
            raise CheckpointError(
                f"{name!r} has the shape {list(saved.shape)} in {self.checkpoint.describe()}, but {list(shape)} here; "
                "load it into the same model, or leave it out"
            )
        dtype = type_of(saved.dtype)
        if target.dtype == dtype and target.is_cpu and is_plain(target):
            self.items.append(ReadItem(known, region, target.detach().view(-1), by_all))
            return
        read = self.region(known, region, by_all=by_all)

        def copy() -> None:
            with copying_into([target]):
                target.copy_(read.view(target.shape))

        self.add_finalizer(copy)

    def region(self, name: str, region: Region, *, by_all: bool = False) -> torch.Tensor:
        """Requests a region; returns the tensor into which its elements will be read."""
        try:
            memory = torch.empty(count(region), dtype=type_of(self.tensors[name].dtype), device="cpu")
        except RuntimeError as error:  # torch ran out of memory
            raise CheckpointError(
                f"{name!r} in {self.checkpoint.describe()} has {count(region):,} elements, for which this process "
                f"cannot get memory: {error}"
            ) from None
        self.items.append(ReadItem(name, region, memory, by_all))
        return memory

    def tensor(self, name: str, *, by_all: bool = True) -> torch.Tensor:
        """Requests a whole tensor; returns the tensor into which it will be read."""
        shape = self.tensors[name].shape
        return self.region(name, whole(shape), by_all=by_all).view(shape)

    def tree(self, name: str, *, by_all: bool = True) -> Callable[[], Any]:
        """Requests the tree with this name; returns a function that returns the tree once it has been read.

        If each rank saved its own tree, this rank's tree is read, or rank 0's tree if this rank saved none; `by_all` is
        then ignored. For an object that was saved in parts, such as a module, the tree is a dict like the result of
        `state_dict`.
        """
        known = self.own_name(name)
        by_all = by_all and known == name
        if known not in self.tensors and known not in self.values:
            return self._parts(known, by_all)
        if known in self.tensors and known not in self.values:
            return self.tensor(known, by_all=by_all).detach
        value = decode(self.values[known])
        tensors = {full: self.tensor(full, by_all=by_all) for full in _references(value)}
        return lambda: put_together(value, tensors.__getitem__)

    def _parts(self, name: str, by_all: bool) -> Callable[[], dict[object, Any]]:
        inner = {key: f"{name}{SEPARATOR}{key}" for key in sorted(set(map(first_key, self.names_below(name))))}
        trees = {key: self.tree(full, by_all=by_all) for key, full in inner.items() if self.has(full)}
        if not trees:
            raise CheckpointError(f"{self.checkpoint.describe()} has no {name!r} for rank {self._rank} of the group")
        return lambda: _with_numbers({unescaped(key): tree() for key, tree in trees.items()})

    def _candidates(self, name: str) -> list[str]:
        return [of_rank(name, self._rank), name, of_rank(name, 0)]


def _with_numbers(state: dict[object, Any]) -> dict[object, Any]:
    """Converts the keys in the state of an optimizer to parameter numbers; returns other states unchanged."""
    groups = state.get("param_groups")
    if not (isinstance(groups, list) and groups):
        return state
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        return state
    return {**state, "state": {number_of(key): kept for key, kept in state.get("state", {}).items()}}


def number_of(key: str) -> int | str:
    """Converts a key that consists of digits to a parameter number; returns other keys unchanged."""
    return int(key) if key.isdigit() else key


def _references(value: object) -> list[str]:
    if isinstance(value, TensorRef):
        return [value.name]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for item in value for name in _references(item)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True)
class _OwnedRange:
    """The bytes `start` to `stop` of an item that all ranks request, and the rank that reads them."""

    item: ReadItem
    start: int
    stop: int
    owner: int


def fill(plan: LoadPlan, channel: CollectiveChannel) -> None:
    """Reads all requested regions from a disk that all ranks share; every rank must call this."""
    by_all = [item for item in plan.items if item.by_all and item.memory.numel()]
    own = [item for item in plan.items if not item.by_all and item.memory.numel()]
    if isinstance(channel, SingleRank) or channel.size == 1:
        own, by_all = [*by_all, *own], []
    ranges = _owned_ranges(by_all, plan, channel.size)
    checkpoint = plan.checkpoint
    assert isinstance(checkpoint, Checkpoint)

    def read() -> bytes:
        for item in own:
            checkpoint.read_into(item.name, item.region, memory_with(item.memory))
        for owned in ranges:
            if owned.owner == channel.rank:
                _read_range(checkpoint, owned)
        return _digest(by_all)

    if len(set(results_of_all(read, channel))) > 1:
        raise CheckpointError(
            f"{channel.me}: the ranks load different objects from {plan.checkpoint.describe()}; every rank must call "
            "load with the same modules, optimizers and names"
        )
    if isinstance(channel, GroupChannel):
        _broadcast(ranges, channel)


def _owned_ranges(by_all: Sequence[ReadItem], plan: LoadPlan, size: int) -> list[_OwnedRange]:
    """Assigns the bytes of the items to the ranks in order, with about the same number of bytes for each rank."""
    parts = [(item, start, stop) for item in by_all for start, stop in _whole_blocks(item, plan)]
    total = sum(stop - start for _, start, stop in parts)
    ranges, before = [], 0
    for item, start, stop in parts:
        middle = before + (stop - start) // 2
        ranges.append(_OwnedRange(item, start, stop, min(size - 1, middle * size // max(1, total))))
        before += stop - start
    return ranges


def _whole_blocks(item: ReadItem, plan: LoadPlan) -> list[tuple[int, int]]:
    """Returns the byte ranges of a whole tensor, cut at the boundaries of blocks to avoid reading a block twice."""
    size = item.memory.element_size()
    total = item.memory.numel() * size
    regions = [piece.region for piece in plan.tensors[item.name].pieces]
    flat = [region for region in regions if isinstance(region, Flat)]
    if len(flat) < len(regions):
        return [(0, total)]
    ranges = []
    for begin, end in sorted((region.start * size, region.stop * size) for region in flat):
        ranges += [(start, min(start + BLOCK_NBYTES, end)) for start in range(begin, end, BLOCK_NBYTES)]
    return ranges or [(0, total)]


def _read_range(checkpoint: Checkpoint, owned: _OwnedRange) -> None:
    item, memory = owned.item, byte_view(owned.item.memory)
    region = item.region
    if owned.stop - owned.start < memory.numel():
        size = item.memory.element_size()
        region = Flat(owned.start // size, owned.stop // size)
    checkpoint.read_into(item.name, region, memory_with(memory[owned.start : owned.stop]))


def _digest(by_all: Sequence[ReadItem]) -> bytes:
    total = xxhash.xxh3_64()
    for item in by_all:
        total.update(f"{item.name}\n{item.memory.numel()}\n".encode())
    return total.digest()


def _broadcast(ranges: Sequence[_OwnedRange], channel: GroupChannel) -> None:
    for owner in range(channel.size):
        batch: list[torch.Tensor] = []
        nbytes = 0
        for owned in ranges:
            if owned.owner != owner:
                continue
            batch.append(byte_view(owned.item.memory)[owned.start : owned.stop])
            nbytes += owned.stop - owned.start
            if nbytes >= _BROADCAST_AT_ONCE_NBYTES:
                channel.group.broadcast(batch, owner)
                batch, nbytes = [], 0
        if batch:
            channel.group.broadcast(batch, owner)


@dataclass(frozen=True)
class PieceRequest:
    """A request to rank `server` for the elements that a region has in common with one piece of a tensor.

    `piece` is the index of the piece in the manifest, and `nbytes` is the size of the response.
    """

    server: int
    name: str
    piece: int
    region: Region
    nbytes: int


def fetch(plan: LoadPlan, holders: Mapping[str, Sequence[int]], channel: CollectiveChannel) -> None:
    """Reads all requested regions from the disks of several hosts; every rank must call this.

    The ranks first exchange their requests, and then exchange the pieces in rounds. In each round, every rank sends to
    one rank and receives from one rank. `holders` contains, for each file, the ranks that can read it.
    """
    items = [item for item in plan.items if item.memory.numel()]
    files_here = {file for file, ranks in holders.items() if channel.rank in ranks}
    missing = [(item, request) for item in items for request in _missing(item, plan, holders, files_here, channel.rank)]

    def read() -> list[PieceRequest]:
        if isinstance(plan.checkpoint, Checkpoint):
            for item in items:
                plan.checkpoint.read_into(item.name, item.region, memory_with(item.memory), files=files_here)
        return [request for _, request in missing]

    requests = exchanged(read, list[PieceRequest], channel)
    outcome = encode_result(bytes, channel.me)
    if isinstance(channel, GroupChannel):
        for distance in range(1, channel.size):
            target, source = (channel.rank + distance) % channel.size, (channel.rank - distance) % channel.size
            served = [request for request in requests[target] if request.server == channel.rank]
            own = [(item, request) for item, request in missing if request.server == source]
            fault = _exchange(plan, served, own, target, source, channel)
            outcome = outcome if fault is None else fault
    require_success(channel.all_gather(outcome))


def _missing(
    item: ReadItem, plan: LoadPlan, holders: Mapping[str, Sequence[int]], files_here: set[str], rank: int
) -> Iterator[PieceRequest]:
    """Yields requests for the pieces of an item that are not on this rank's disk.

    Requests for consecutive pieces are sent to different ranks, chosen from those that can read the file.
    """
    entry = plan.tensors[item.name]
    for index, piece in enumerate(entry.pieces):
        if piece.file in files_here:
            continue
        if nbytes := count_common(entry.shape, piece.region, item.region) * ITEMSIZE[entry.dtype]:
            ranks = holders[piece.file]
            yield PieceRequest(ranks[(rank + index) % len(ranks)], item.name, index, item.region, nbytes)


def _exchange(
    plan: LoadPlan,
    served: Sequence[PieceRequest],
    own: Sequence[tuple[ReadItem, PieceRequest]],
    target: int,
    source: int,
    channel: GroupChannel,
) -> bytes | None:
    """Sends the pieces that rank `target` requested, and receives those that this rank requested from rank `source`.

    Returns the encoded error if this rank could not read a piece, or None.
    """
    fault: bytes | None = None
    outgoing = _batches([request.nbytes for request in served])
    incoming = _batches([request.nbytes for _, request in own])
    for sends, receives in zip_longest(outgoing, incoming):
        work = None
        if sends is not None:
            batch = served[sends.start : sends.stop]
            sent = torch.zeros(sum(request.nbytes for request in batch), dtype=torch.uint8, device="cpu")
            answer = encode_result(partial(_read_pieces, plan, batch, sent), channel.me)
            # if reading failed, zeros are sent in place of the data, and the error is raised after the exchange
            fault = fault if is_success(answer) else answer
            work = channel.group.send(sent, target, 0, True)
        if receives is not None:
            own_batch = own[receives.start : receives.stop]
            received = torch.empty(sum(request.nbytes for _, request in own_batch), dtype=torch.uint8, device="cpu")
            channel.group.recv(received, source, 0, False)
            _put(plan, own_batch, received)
        if work is not None:
            work.wait()
    return fault


def _read_pieces(plan: LoadPlan, served: Sequence[PieceRequest], sent: torch.Tensor) -> None:
    assert isinstance(plan.checkpoint, Checkpoint)
    offset, memory = 0, memory_with(sent)
    for request in served:
        piece = plan.checkpoint.read_piece(request.name, request.piece, request.region)
        memory[offset : offset + request.nbytes] = piece
        offset += request.nbytes


def _put(plan: LoadPlan, own: Sequence[tuple[ReadItem, PieceRequest]], received: torch.Tensor) -> None:
    offset = 0
    for item, request in own:
        entry = plan.tensors[item.name]
        size, memory = ITEMSIZE[entry.dtype], byte_view(item.memory)
        for part in copies(entry.shape, entry.pieces[request.piece].region, item.region):
            first, nbytes = part.target * size, part.nelements * size
            memory[first : first + nbytes] = received[offset : offset + nbytes]
            offset += nbytes


def _batches(sizes: Sequence[int]) -> list[range]:
    """Returns, for each message, the range of indices whose bytes it contains.

    >>> _batches([60 << 20, 8 << 20, 1, 100 << 20])
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    batches: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _EXCHANGED_AT_ONCE_NBYTES:
            batches.append(range(start, index))
            start, total = index, 0
        total += size
    return [*batches, range(start, len(sizes))] if sizes else []
