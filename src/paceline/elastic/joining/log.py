"""The log of a donor: the results of the rounds since its snapshot, in memory that its child reads.

The file has a name in no folder. The donor appends to it, and never waits: its size tells the child how much is there.
The child gives the memory of results back that the learner has got.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from paceline.elastic.joining.wire import (
    CHUNK_BYTES,
    Entered,
    Item,
    Result,
    Stepped,
    body_bytes,
    decode_head,
    encode_head,
)
from paceline.system_calls import memfd_create

_LENGTH = struct.Struct("<Q")  # of the head that follows
_PIECES = 512  # that one system call writes
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None)


def new_log() -> int:
    """Returns the descriptor of an empty log.

    Raises:
        OSError: there are no descriptors, or no memory.
    """
    return memfd_create("paceline-results")


def append(log: int, item: Item, body: Sequence[memoryview] = ()) -> int:
    """Appends to a log; returns its size.

    Raises:
        OSError: there is no memory.
    """
    head = encode_head(item)
    pieces = [memoryview(_LENGTH.pack(len(head))), memoryview(head), *(each for each in body if len(each))]
    while pieces:
        count = os.writev(log, pieces[:_PIECES])
        while pieces and count >= len(pieces[0]):
            count -= len(pieces[0])
            del pieces[0]
        if count:
            pieces[0] = pieces[0][count:]
    return os.lseek(log, 0, os.SEEK_CUR)


@dataclass(frozen=True)
class Entry:
    """Where an item lies in a log: its head, and its body, which ends at `stop`."""

    item: Item
    body: int
    stop: int


class LogReader:
    """The child's view of a log, with reads that do not move the place at which the donor writes."""

    def __init__(self, log: int) -> None:
        self.file = log
        self._entries: list[Entry] = []
        self._stop = 0
        self._done = 0  # where the memory that was given back ends

    @property
    def ahead(self) -> int:
        """How many results are there that the learner has not got."""
        return sum(isinstance(entry.item, Result) for entry in self._entries)

    def next(self, round_: int, generation: int, steps: int = 0) -> Entry | None:
        """Returns what a learner needs in that round; None if it is not there yet.

        Args:
            round_: the round.
            generation: the latest view of which the learner knows that the members have entered it.
            steps: how many steps of optimizers it has got of this round.
        """
        self._read()
        for entry in self._entries:
            match entry.item:
                case item if item.round != round_:
                    continue
                case Stepped() if steps > 0:
                    steps -= 1
                case Entered(generation=entered) if entered <= generation:
                    continue
                case _:
                    return entry
        return None

    def forget(self, round_: int, steps: int = 0) -> int:
        """Gives back the memory of what comes before a round.

        Returns:
            Up to where a learner has the log that has so many steps of that round, too.
        """
        self._read()
        kept = [entry for entry in self._entries if entry.item.round >= round_]
        gone = self._entries[: len(self._entries) - len(kept)]
        self._entries = kept
        if gone:
            self._done = gone[-1].stop
            _libc.fallocate(self.file, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(self._done))
        own = [entry.stop for entry in kept if entry.item.round == round_ and isinstance(entry.item, Stepped)]
        return max([self._done, *own[:steps]])

    def digest_of(self, entry: Entry) -> bytes:
        """Returns the digest of an entry's body."""
        total = xxhash.xxh3_128(seed=0)
        for at in range(entry.body, entry.stop, CHUNK_BYTES):
            total.update(os.pread(self.file, min(CHUNK_BYTES, entry.stop - at), at))
        return total.digest()

    def _read(self) -> None:
        size = os.fstat(self.file).st_size
        while self._stop + _LENGTH.size <= size:
            at = self._stop + _LENGTH.size
            (length,) = _LENGTH.unpack(os.pread(self.file, _LENGTH.size, self._stop))
            if at + length > size:
                return
            item = decode_head(os.pread(self.file, length, at))
            assert isinstance(item, (Result, Stepped, Entered))
            stop = at + length + body_bytes(item)
            if stop > size:
                return
            self._entries.append(Entry(item, at + length, stop))
            self._stop = stop
