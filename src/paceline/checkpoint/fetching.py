"""Reads what ranks want of a checkpoint on the disks of several hosts: from the own disk, and the rest from others.

Each rank tells all others which pieces it lacks, and whom of those that see the file it asks. Then the ranks send them
to each other in rounds, in each of which a rank sends to one other and receives from one other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from paceline.checkpoint.filling import Filling, Wanted
from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.copies import copies
from paceline.checkpoint.format.dtypes import ITEMSIZE
from paceline.checkpoint.format.regions import Region
from paceline.checkpoint.memory import as_bytes, memory_with
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.owners import packed_region, unpacked_region
from paceline.checkpoint.talking import Alone, GroupTalk

_SENT_AT_ONCE = 64 << 20  # bytes in one message, unless a piece has more


@dataclass(frozen=True)
class Request:
    """What one piece of a tensor has of a region that a rank wants; `server` is asked for it."""

    server: int
    name: str
    piece: int
    region: Region
    nbytes: int

    def packed(self) -> list[object]:
        """Returns this as JSON has it."""
        return [self.server, self.name, self.piece, packed_region(self.region), self.nbytes]


def fetch(filling: Filling, holders: Mapping[str, Sequence[int]], talk: GroupTalk | Alone) -> None:
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

    everyone = [json.loads(heard(each)) for each in talk.exchange(told(read, talk.me))]
    outcome = told(lambda: b"", talk.me)
    if isinstance(talk, GroupTalk):
        for distance in range(1, talk.size):
            to, source = (talk.rank + distance) % talk.size, (talk.rank - distance) % talk.size
            asked = [Request(s, n, p, unpacked_region(r), size) for s, n, p, r, size in everyone[to] if s == talk.rank]
            own = [(each, request) for each, request in missing if request.server == source]
            fault = _exchange(filling, asked, own, to, source, talk)
            outcome = outcome if fault is None else fault
    for each in talk.exchange(outcome):
        heard(each)


def _missing(
    wanted: Wanted, filling: Filling, holders: Mapping[str, Sequence[int]], here: set[str], rank: int
) -> Iterator[Request]:
    """Yields what this rank's disk lacks of something; the ranks that see a file are asked in turn."""
    entry = filling.tensors[wanted.name]
    for number, piece in enumerate(entry.pieces):
        if piece.file not in here and (parts := copies(entry.shape, piece.region, wanted.region)):
            ranks = holders[piece.file]
            nbytes = sum(part.nelements for part in parts) * ITEMSIZE[entry.dtype]
            yield Request(ranks[(rank + number) % len(ranks)], wanted.name, number, wanted.region, nbytes)


def _exchange(
    filling: Filling,
    asked: Sequence[Request],
    own: Sequence[tuple[Wanted, Request]],
    to: int,
    source: int,
    talk: GroupTalk,
) -> bytes | None:
    """Sends what rank `to` asked for, and receives what rank `source` was asked for; returns why it could not read."""
    fault: bytes | None = None
    outgoing = _batches([each.nbytes for each in asked])
    incoming = _batches([request.nbytes for _, request in own])
    for sends, receives in zip_longest(outgoing, incoming):
        work = None
        if sends is not None:
            sent = torch.zeros(sum(asked[at].nbytes for at in sends), dtype=torch.uint8)
            answer = told(partial(_fill, filling, [asked[at] for at in sends], sent), talk.me)
            fault = answer if answer[:1] != b"+" else fault  # zeros are sent, and all learn of it at the end
            work = talk.group.send(sent, to, 0, True)
        if receives is not None:
            received = torch.empty(sum(own[at][1].nbytes for at in receives), dtype=torch.uint8)
            talk.group.recv(received, source, 0, False)
            _put(filling, [own[at] for at in receives], received)
        if work is not None:
            work.wait()
    return fault


def _fill(filling: Filling, asked: Sequence[Request], sent: torch.Tensor) -> bytes:
    assert isinstance(filling.checkpoint, Checkpoint)
    at, memory = 0, memory_with(sent)
    for each in asked:
        memory[at : at + each.nbytes] = filling.checkpoint.read_piece(each.name, each.piece, each.region)
        at += each.nbytes
    return b""


def _put(filling: Filling, own: Sequence[tuple[Wanted, Request]], received: torch.Tensor) -> None:
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
        if at > start and total + size > _SENT_AT_ONCE:
            batches.append(range(start, at))
            start, total = at, 0
        total += size
    return [*batches, range(start, len(sizes))] if sizes else []
