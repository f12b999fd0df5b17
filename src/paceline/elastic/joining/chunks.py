"""Which chunk of a snapshot is asked of which donor, and where in the buffers a chunk lies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Chunks:
    """The chunks that a learner still needs; a donor that is lost costs those that it has not sent.

    When all that are left have been asked for, an idle donor is asked for them again, so that none holds the others up.

    >>> chunks = Chunks(2)
    >>> chunks.next_for("a"), chunks.next_for("b"), chunks.lost("b"), chunks.next_for("a")
    (0, 1, None, 1)
    """

    def __init__(self, count: int) -> None:
        self._waiting = list(range(count))[::-1]
        self._asked: dict[int, set[str]] = {}
        self._missing = set(range(count))

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have come."""
        return not self._missing

    def next_for(self, donor: str) -> int | None:
        """Returns the chunk that this donor is asked for next; None if it has to send all that are left."""
        while self._waiting:
            chunk = self._waiting.pop()
            if chunk in self._missing:
                self._asked.setdefault(chunk, set()).add(donor)
                return chunk
        shared = [chunk for chunk, donors in self._asked.items() if donor not in donors]
        if not shared:
            return None
        chunk = min(shared, key=lambda each: (len(self._asked[each]), each))
        self._asked[chunk].add(donor)
        return chunk

    def arrived(self, chunk: int) -> bool:
        """Notes that a chunk has come, whole; returns whether it had not come before."""
        is_new = chunk in self._missing
        self._missing.discard(chunk)
        self._asked.pop(chunk, None)
        return is_new

    def lost(self, donor: str) -> None:
        """Gives back what only this donor was asked for."""
        for chunk, donors in list(self._asked.items()):
            donors.discard(donor)
            if not donors:
                del self._asked[chunk]
                self._waiting.append(chunk)


class Layout:
    """Where chunks lie: the buffers are taken as one run of bytes, which is cut every `chunk_bytes`.

    >>> Layout([3, 0, 4], 5).spans(0)
    [(0, 0, 3), (2, 0, 2)]
    >>> Layout([3, 0, 4], 5).spans(1)
    [(2, 2, 4)]
    """

    def __init__(self, sizes: Sequence[int], chunk_bytes: int) -> None:
        self._sizes, self._chunk_bytes = sizes, chunk_bytes
        self._ends = list(accumulate(sizes))
        self.nbytes = self._ends[-1] if sizes else 0
        self.count = -(-self.nbytes // chunk_bytes)

    def spans(self, chunk: int) -> list[tuple[int, int, int]]:
        """Returns a chunk's parts: a buffer, and the first byte and the one after the last within it."""
        at, stop = chunk * self._chunk_bytes, min((chunk + 1) * self._chunk_bytes, self.nbytes)
        buffer, found = bisect_right(self._ends, at), []
        while at < stop:
            first = at - (self._ends[buffer] - self._sizes[buffer])
            last = min(self._sizes[buffer], first + stop - at)
            if last > first:
                found.append((buffer, first, last))
            at += last - first
            buffer += 1
        return found
