"""Reads what the ranks want: what all want once, and sends it to the others; what a rank alone wants by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from paceline.checkpoint.filling import Filling, Wanted, pieces_of
from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.manifest import BLOCK_NBYTES
from paceline.checkpoint.format.regions import Flat, whole
from paceline.checkpoint.memory import as_bytes, memory_with
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.talking import Alone, GroupTalk
from paceline.errors import CheckpointError

_SENT_AT_ONCE = 256 << 20  # bytes in one call, so that a rank that reads slowly does not hold all others up to the end


def fill(filling: Filling, talk: GroupTalk | Alone) -> None:
    """Reads everything that is wanted from a disk that all ranks share; every rank calls this.

    Raises:
        CheckpointError: the ranks want different things of what all want, or a rank could not read.
        CheckpointDamagedError: a file has changed since it was written; raised on every rank.
    """
    by_all = [each for each in filling.wanted if each.by_all and each.memory.numel()]
    own = [each for each in filling.wanted if not each.by_all and each.memory.numel()]
    if isinstance(talk, Alone) or talk.size == 1:
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

    answers = [heard(each) for each in talk.exchange(told(read, talk.me))]
    if len(set(answers)) > 1:
        raise CheckpointError(
            f"{talk.me}: the ranks load different things from {filling.checkpoint.describe()}; every rank must call "
            "load with the same modules, optimizers and names"
        )
    if isinstance(talk, GroupTalk):
        _send(owners, talk)


Owned = tuple[Wanted, int, int, int]  # the bytes of what is wanted from one to another, and the rank that reads them


def _owners(by_all: Sequence[Wanted], filling: Filling, size: int) -> list[Owned]:
    """Returns which rank reads which bytes; all ranks have about as many."""
    parts = [(each, start, stop) for each in by_all for start, stop in pieces_of(each, filling, BLOCK_NBYTES)]
    total = sum(stop - start for _, start, stop in parts)
    owners, before = [], 0
    for each, start, stop in parts:
        middle = before + (stop - start) // 2
        owners.append((each, start, stop, min(size - 1, middle * size // max(1, total))))
        before += stop - start
    return owners


def _read_bytes(filling: Filling, wanted: Wanted, start: int, stop: int) -> None:
    memory = as_bytes(wanted.memory)
    assert isinstance(filling.checkpoint, Checkpoint)
    if stop - start == memory.numel():
        filling.checkpoint.read_into(wanted.name, whole(filling.tensors[wanted.name].shape), memory_with(wanted.memory))
        return
    item = wanted.memory.element_size()
    filling.checkpoint.read_into(wanted.name, Flat(start // item, stop // item), memory_with(memory[start:stop]))


def _digest(by_all: Sequence[Wanted]) -> bytes:
    total = xxhash.xxh3_64()
    for each in by_all:
        total.update(f"{each.name}\n{each.memory.numel()}\n".encode())
    return total.digest()


def _send(owners: Sequence[Owned], talk: GroupTalk) -> None:
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
