"""What a rank wants of a checkpoint, and where it is to be put.

Reads what ranks want of a checkpoint on the disks of several hosts: from the own disk, and the rest from others.

Each rank tells all others which pieces it lacks, and whom of those that see the file it asks. Then the ranks send them
to each other in rounds, in each of which a rank sends to one other and receives from one other.

Reads what the ranks want: what all want once, and sends it to the others; what a rank alone wants by itself.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import xxhash

from paceline.comm.group.buffers import count_writes
from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import BLOCK_NBYTES
from paceline.train.checkpoint.format.regions import Flat, Region, copies, count, whole
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE
from paceline.train.checkpoint.format.values import SEPARATOR, TensorRef, decode, of_rank, unescaped
from paceline.train.checkpoint.host_disks import AbsentCheckpoint
from paceline.train.checkpoint.ownership import packed_region, unpacked_region
from paceline.train.checkpoint.pytree import as_bytes, memory_with, put_together, type_of
from paceline.train.checkpoint.rank_channel import GroupChannel, SingleRank, decode_result, encode_result

_AFTER_SEPARATOR = chr(ord(SEPARATOR) + 1)


@dataclass(frozen=True)
class ReadItem:
    """A region of a tensor, and the memory for it: elements of the saved type in one piece on the CPU.

    `by_all` says that every rank wants the same, so that it is read once and sent to the others.
    """

    name: str
    region: Region
    memory: torch.Tensor
    by_all: bool


class LoadPlan:
    """Collects what is wanted; when it has been read, `finish` puts everything where it belongs.

    Args:
        checkpoint: where it is read from.
        rank: this rank.
    """

    def __init__(self, checkpoint: Checkpoint | AbsentCheckpoint, rank: int) -> None:
        self.checkpoint = checkpoint
        self.tensors = checkpoint.manifest.tensors
        if not isinstance(checkpoint.manifest.values, dict):
            raise CheckpointError(f"{checkpoint.describe()} was not saved by paceline.save: its values have no names")
        self.values = checkpoint.manifest.values
        self.wanted: list[ReadItem] = []
        self._names = sorted({*self.tensors, *self.values})
        self._rank = rank
        self._last: list[Callable[[], None]] = []

    def names_below(self, name: str) -> dict[str, str]:
        """Returns the names of tensors and values within `name`, by the rest of them."""
        first, stop = (bisect.bisect_left(self._names, name + end) for end in (SEPARATOR, _AFTER_SEPARATOR))
        return {each[len(name) + 1 :]: each for each in self._names[first:stop]}

    def has(self, name: str) -> bool:
        """Whether there is anything of that name, or within it."""
        known = (self.tensors, self.values)
        return any(each in names for names in known for each in self._own(name)) or bool(self.names_below(name))

    def top_names(self) -> list[str]:
        """Returns the names of what was saved, without what is within it."""
        return sorted({each.partition(SEPARATOR)[0].partition("@")[0] for each in self._names})

    def add_finalizer(self, work: Callable[[], None]) -> None:
        """Has `work` done when everything has been read."""
        self._last.append(work)

    def finish(self) -> None:
        """Does what was to be done when everything has been read."""
        count_writes(each.memory for each in self.wanted)
        for work in self._last:
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
        """Wants a tensor, or a part of it, to be put into `target`.

        Args:
            shape: of the whole tensor, if `target` is not all of it.
            region: which part of it `target` is.
            by_all: whether all ranks want the same.

        Raises:
            CheckpointError: the checkpoint has it with another shape, or it is no tensor there.
        """
        if (saved := self.tensors.get(name)) is None:
            raise CheckpointError(
                f"{name!r} is a tensor here, and something else in {self.checkpoint.describe()}; load it into what it "
                "was saved from, or into None to be given what was saved"
            )
        shape = tuple(target.shape) if shape is None else shape
        region = whole(shape) if region is None else region
        if shape != saved.shape:
            raise CheckpointError(
                f"{name!r} has the shape {list(saved.shape)} in {self.checkpoint.describe()}, and "
                f"{list(shape)} here; load it into the same model, or leave it out"
            )
        dtype = type_of(saved.dtype)
        if target.dtype == dtype and target.is_cpu and target.is_contiguous():
            self.wanted.append(ReadItem(name, region, target.detach().view(-1), by_all))
            return
        read = self.region(name, region, by_all=by_all)

        def copy() -> None:
            with torch.no_grad():
                target.copy_(read.view(target.shape))

        self.add_finalizer(copy)

    def region(self, name: str, region: Region, *, by_all: bool = False) -> torch.Tensor:
        """Returns memory in which the elements of a region will be."""
        try:
            memory = torch.empty(count(region), dtype=type_of(self.tensors[name].dtype), device="cpu")
        except RuntimeError as error:  # torch's, for want of memory
            raise CheckpointError(
                f"{name!r} in {self.checkpoint.describe()} has {count(region):,} elements, for which this process "
                f"cannot get memory: {error}"
            ) from None
        self.wanted.append(ReadItem(name, region, memory, by_all))
        return memory

    def tensor(self, name: str, *, by_all: bool = True) -> torch.Tensor:
        """Returns memory in which the tensor will be, in its shape."""
        shape = self.tensors[name].shape
        return self.region(name, whole(shape), by_all=by_all).view(shape)

    def tree(self, name: str, *, by_all: bool = True) -> Callable[[], Any]:
        """Returns a function that returns the tree of that name when everything has been read.

        If each rank kept its own, it is this rank's, or the first one's if there is none of this rank. `by_all` is
        whether all ranks want the same if it is one for all. What was saved in parts, such as a module or a dict of
        tensors, is a dict of them: what its `state_dict` returned, or the dict.

        Raises:
            CheckpointError: there is nothing of that name.
        """
        known = next((each for each in self._own(name) if each in self.values or each in self.tensors), None)
        if known is None:
            return self._parts(name, by_all)
        by_all = by_all and known == name
        if known in self.tensors and known not in self.values:
            tensor = self.tensor(known, by_all=by_all)
            return lambda: tensor
        value = decode(self.values[known])
        found: dict[str, torch.Tensor] = {}
        for each in _references(value):
            found[each] = self.tensor(each, by_all=by_all)
        return lambda: put_together(value, found.__getitem__)

    def _parts(self, name: str, by_all: bool) -> Callable[[], dict[object, Any]]:
        keys = {rest.partition(SEPARATOR)[0].partition("@")[0] for rest in self.names_below(name)}
        inner = {key: f"{name}{SEPARATOR}{key}" for key in sorted(keys)}
        trees = {key: self.tree(full, by_all=by_all) for key, full in inner.items() if self.has(full)}
        if not trees:
            raise CheckpointError(f"{self.checkpoint.describe()} has no {name!r} for rank {self._rank} of the group")
        return lambda: _with_numbers({unescaped(key): tree() for key, tree in trees.items()})

    def _own(self, name: str) -> list[str]:
        return [of_rank(name, self._rank), name, of_rank(name, 0)]


def _with_numbers(state: dict[object, Any]) -> dict[object, Any]:
    """Returns a state; if it is an optimizer's, by the numbers of its parameters, of which names are texts."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) and "params" in each for each in groups):
        return state
    return {**state, "state": {number_of(key): each for key, each in state.get("state", {}).items()}}


def number_of(key: str) -> int | str:
    """Returns a parameter's number in an optimizer's state, given it as a text; other keys as they are."""
    return int(key) if key.isdigit() else key


def _references(value: object) -> list[str]:
    if isinstance(value, TensorRef):
        return [value.name]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for each in value for name in _references(each)] if isinstance(value, (list, tuple)) else []


def pieces_of(wanted: ReadItem, filling: LoadPlan, unit_nbytes: int) -> list[tuple[int, int]]:
    """Returns the bytes of a wanted whole tensor, in order, in parts that one rank reads as it likes.

    They begin where pieces of the file do and are as long as the blocks that have digests, so that no block is read
    twice.
    """
    entry = filling.tensors[wanted.name]
    size = wanted.memory.element_size()
    total = wanted.memory.numel() * size
    flat = [each.region for each in entry.pieces]
    if not all(isinstance(each, Flat) for each in flat):
        return [(0, total)]
    parts = []
    for each in sorted((each.start * size, each.stop * size) for each in flat if isinstance(each, Flat)):
        parts += [(start, min(start + unit_nbytes, each[1])) for start in range(each[0], each[1], unit_nbytes)]
    return parts or [(0, total)]


_EXCHANGED_AT_ONCE_NBYTES = 64 << 20  # bytes in one message, unless a piece has more


@dataclass(frozen=True)
class PieceRequest:
    """What one piece of a tensor has of a region that a rank wants; `server` is asked for it."""

    server: int
    name: str
    piece: int
    region: Region
    nbytes: int

    def packed(self) -> list[object]:
        """Returns this as JSON has it."""
        return [self.server, self.name, self.piece, packed_region(self.region), self.nbytes]


def fetch(filling: LoadPlan, holders: Mapping[str, Sequence[int]], talk: GroupChannel | SingleRank) -> None:
    """Reads everything that is wanted; every rank calls this.

    Args:
        holders: for each file the ranks that see it.

    Raises:
        CheckpointError: a rank could not read.
        CheckpointDamagedError: a file has changed since it was written; raised on every rank.
    """
    wanted = [each for each in filling.wanted if each.memory.numel()]
    here = {file for file, ranks in holders.items() if talk.rank in ranks}
    missing = [(each, request) for each in wanted for request in _missing(each, filling, holders, here, talk.rank)]

    def read() -> bytes:
        if isinstance(filling.checkpoint, Checkpoint):
            for each in wanted:
                filling.checkpoint.read_into(each.name, each.region, memory_with(each.memory), files=here)
        return json.dumps([request.packed() for _, request in missing]).encode()

    everyone = [json.loads(decode_result(each)) for each in talk.exchange(encode_result(read, talk.me))]
    outcome = encode_result(lambda: b"", talk.me)
    if isinstance(talk, GroupChannel):
        for distance in range(1, talk.size):
            to, source = (talk.rank + distance) % talk.size, (talk.rank - distance) % talk.size
            asked = [
                PieceRequest(s, n, p, unpacked_region(r), size) for s, n, p, r, size in everyone[to] if s == talk.rank
            ]
            own = [(each, request) for each, request in missing if request.server == source]
            fault = _exchange(filling, asked, own, to, source, talk)
            outcome = outcome if fault is None else fault
    for each in talk.exchange(outcome):
        decode_result(each)


def _missing(
    wanted: ReadItem, filling: LoadPlan, holders: Mapping[str, Sequence[int]], here: set[str], rank: int
) -> Iterator[PieceRequest]:
    """Yields what this rank's disk lacks of something; the ranks that see a file are asked in turn."""
    entry = filling.tensors[wanted.name]
    for number, piece in enumerate(entry.pieces):
        if piece.file not in here and (parts := copies(entry.shape, piece.region, wanted.region)):
            ranks = holders[piece.file]
            nbytes = sum(part.nelements for part in parts) * ITEMSIZE[entry.dtype]
            yield PieceRequest(ranks[(rank + number) % len(ranks)], wanted.name, number, wanted.region, nbytes)


def _exchange(
    filling: LoadPlan,
    asked: Sequence[PieceRequest],
    own: Sequence[tuple[ReadItem, PieceRequest]],
    to: int,
    source: int,
    talk: GroupChannel,
) -> bytes | None:
    """Sends what rank `to` asked for, and receives what rank `source` was asked for; returns why it could not read."""
    fault: bytes | None = None
    outgoing = _batches([each.nbytes for each in asked])
    incoming = _batches([request.nbytes for _, request in own])
    for sends, receives in zip_longest(outgoing, incoming):
        work = None
        if sends is not None:
            sent = torch.zeros(sum(asked[at].nbytes for at in sends), dtype=torch.uint8)
            answer = encode_result(partial(_fill, filling, [asked[at] for at in sends], sent), talk.me)
            fault = answer if answer[:1] != b"+" else fault  # zeros are sent, and all learn of it at the end
            work = talk.group.send(sent, to, 0, True)
        if receives is not None:
            received = torch.empty(sum(own[at][1].nbytes for at in receives), dtype=torch.uint8)
            talk.group.recv(received, source, 0, False)
            _put(filling, [own[at] for at in receives], received)
        if work is not None:
            work.wait()
    return fault


def _fill(filling: LoadPlan, asked: Sequence[PieceRequest], sent: torch.Tensor) -> bytes:
    assert isinstance(filling.checkpoint, Checkpoint)
    at, memory = 0, memory_with(sent)
    for each in asked:
        memory[at : at + each.nbytes] = filling.checkpoint.read_piece(each.name, each.piece, each.region)
        at += each.nbytes
    return b""


def _put(filling: LoadPlan, own: Sequence[tuple[ReadItem, PieceRequest]], received: torch.Tensor) -> None:
    at = 0
    for wanted, request in own:
        entry = filling.tensors[wanted.name]
        size, memory = ITEMSIZE[entry.dtype], as_bytes(wanted.memory)
        for part in copies(entry.shape, entry.pieces[request.piece].region, wanted.region):
            first, nbytes = part.target * size, part.nelements * size
            memory[first : first + nbytes] = received[at : at + nbytes]
            at += nbytes


def _batches(sizes: Sequence[int]) -> list[range]:
    """Returns consecutive places whose sizes are sent together.

    >>> _batches([60 << 20, 8 << 20, 1, 100 << 20])
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    batches: list[range] = []
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and total + size > _EXCHANGED_AT_ONCE_NBYTES:
            batches.append(range(start, at))
            start, total = at, 0
        total += size
    return [*batches, range(start, len(sizes))] if sizes else []


_SENT_AT_ONCE = 256 << 20  # bytes in one call, so that a rank that reads slowly does not hold all others up to the end


def fill(filling: LoadPlan, talk: GroupChannel | SingleRank) -> None:
    """Reads everything that is wanted from a disk that all ranks share; every rank calls this.

    Raises:
        CheckpointError: the ranks want different things of what all want, or a rank could not read.
        CheckpointDamagedError: a file has changed since it was written; raised on every rank.
    """
    by_all = [each for each in filling.wanted if each.by_all and each.memory.numel()]
    own = [each for each in filling.wanted if not each.by_all and each.memory.numel()]
    if isinstance(talk, SingleRank) or talk.size == 1:
        own, by_all = [*by_all, *own], []
    owners = _owners(by_all, filling, talk.size)
    checkpoint = filling.checkpoint
    assert isinstance(checkpoint, Checkpoint)

    def read() -> bytes:
        for each in own:
            checkpoint.read_into(each.name, each.region, memory_with(each.memory))
        for each, start, stop, owner in owners:
            if owner == talk.rank:
                _read_bytes(filling, each, start, stop)
        return _digest(by_all)

    answers = [decode_result(each) for each in talk.exchange(encode_result(read, talk.me))]
    if len(set(answers)) > 1:
        raise CheckpointError(
            f"{talk.me}: the ranks load different things from {filling.checkpoint.describe()}; every rank must call "
            "load with the same modules, optimizers and names"
        )
    if isinstance(talk, GroupChannel):
        _send(owners, talk)


Owned = tuple[ReadItem, int, int, int]  # the bytes of what is wanted from one to another, and the rank that reads them


def _owners(by_all: Sequence[ReadItem], filling: LoadPlan, size: int) -> list[Owned]:
    """Returns which rank reads which bytes; all ranks have about as many."""
    parts = [(each, start, stop) for each in by_all for start, stop in pieces_of(each, filling, BLOCK_NBYTES)]
    total = sum(stop - start for _, start, stop in parts)
    owners, before = [], 0
    for each, start, stop in parts:
        middle = before + (stop - start) // 2
        owners.append((each, start, stop, min(size - 1, middle * size // max(1, total))))
        before += stop - start
    return owners


def _read_bytes(filling: LoadPlan, wanted: ReadItem, start: int, stop: int) -> None:
    memory = as_bytes(wanted.memory)
    assert isinstance(filling.checkpoint, Checkpoint)
    if stop - start == memory.numel():
        filling.checkpoint.read_into(wanted.name, whole(filling.tensors[wanted.name].shape), memory_with(wanted.memory))
        return
    item = wanted.memory.element_size()
    filling.checkpoint.read_into(wanted.name, Flat(start // item, stop // item), memory_with(memory[start:stop]))


def _digest(by_all: Sequence[ReadItem]) -> bytes:
    total = xxhash.xxh3_64()
    for each in by_all:
        total.update(f"{each.name}\n{each.memory.numel()}\n".encode())
    return total.digest()


def _send(owners: Sequence[Owned], talk: GroupChannel) -> None:
    for owner in range(talk.size):
        batch: list[torch.Tensor] = []
        nbytes = 0
        for wanted, start, stop, reader in owners:
            if reader != owner:
                continue
            batch.append(as_bytes(wanted.memory)[start:stop])
            nbytes += stop - start
            if nbytes >= _SENT_AT_ONCE:
                talk.group.broadcast(batch, owner)
                batch, nbytes = [], 0
        if batch:
            talk.group.broadcast(batch, owner)
