"""A ring of entries in a recording that grows, read bit by bit: only what is new, and only what is wanted of it.

An entry's place is its index modulo the ring's size (native/record/recorder.cpp), hence the new ones are one or two
slices. To take an entry apart takes Python a microsecond, which counts with 64 ranks; therefore the words that tell
which entries are wanted can be read as columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

from paceline.record import layout

ReadAt = Callable[[int, int], bytes]  # (offset, bytes) -> what is there


class Entries:
    """Entries that lie behind each other in a copy of a table; `complete` are the places of those that are whole."""

    def __init__(self, data: bytes, entry: struct.Struct, complete: Sequence[int]) -> None:
        self._data = data
        self._entry = entry
        self._words = memoryview(data).cast("Q")
        self.complete = complete

    def column(self, word: int) -> list[int]:
        """Returns one word of each entry, which takes a fraction of the time that taking them apart does."""
        return self._words[word :: self._entry.size // 8].tolist()

    def __getitem__(self, place: int) -> tuple[int, ...]:
        return self._entry.unpack_from(self._data, place * self._entry.size)


class Table:
    """A ring of entries of which those up to some index have been seen."""

    def __init__(self, entry: struct.Struct, most: int | None) -> None:
        self._entry = entry
        self._most = most
        self._offset = self._capacity = 0
        self._next = 0
        self._lasting: set[int] = set()

    def place(self, offset: int, capacity: int) -> None:
        """Begins anew, with the ring at another place."""
        self._offset, self._capacity = offset, capacity
        self._next = 0
        self._lasting.clear()

    def take(self, read: ReadAt, begun: int) -> tuple[list[Entries], list[tuple[int, ...]]]:
        """Returns the entries that have been completed since the last call, and those that are open."""
        new: list[Entries] = []
        lasting: list[tuple[int, ...]] = []
        size = self._entry.size
        for index in sorted(self._lasting):
            data = read(self._offset + index % self._capacity * size, size)
            if self._is_complete(self._entry.unpack(data), index, lasting):
                new.append(Entries(data, self._entry, (0,)))
        first = max(self._next, begun - (self._capacity if self._most is None else self._most))
        for start, end in self._slices(first, begun):
            data = read(self._offset + start % self._capacity * size, (end - start) * size)
            entries = Entries(data, self._entry, range(end - start))
            odd = [
                place
                for place, stamp in enumerate(entries.column(0))
                if (stamp >> 8 != start + place or stamp & 3)
                and not self._is_complete(entries[place], start + place, lasting)
            ]
            if odd:
                entries.complete = sorted(set(entries.complete).difference(odd))
            new.append(entries)
        self._next = begun
        return new, lasting

    def _slices(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        while first < end:
            until = min(end, (first // self._capacity + 1) * self._capacity)
            yield first, until
            first = until

    def _is_complete(self, entry: tuple[int, ...], index: int, lasting: list[tuple[int, ...]]) -> bool:
        """Returns whether this is the entry of that index and complete; otherwise notes whether to come back for it."""
        stamp, owner = entry[0], entry[0] >> 8
        if stamp == 0 or (owner < index and stamp & 3 == 0):
            self._lasting.add(index)  # it is about to be written
        elif owner != index:
            self._lasting.discard(index)  # a newer entry has this place, or an older one that lasts was left in it
        elif stamp & 3 == 0:
            self._lasting.discard(index)
            return True
        else:
            self._lasting.add(index)
            if stamp & 3 == layout.OPEN:
                lasting.append(entry)
        return False
