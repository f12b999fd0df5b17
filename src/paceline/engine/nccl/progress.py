"""Which call each rank of a call stream came to, told through the store, so that a time-out can name who is missing."""

from __future__ import annotations

import contextlib
import json
import time

from paceline.engine.channel import HeaderFields
from paceline.errors import StoreError
from paceline.store.base import Store

_EVERY_S = 0.5
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class RankProgress:
    """This rank's calls, and what the others tell of theirs. What it tells of is at most half a second old."""

    def __init__(self, store: Store, at: int, size: int) -> None:
        self._store = store
        self._at = at
        self._size = size
        self._latest = _NO_CALL
        self._told = _NO_CALL
        self._told_at = time.monotonic()

    def arrive(self, call: HeaderFields) -> None:
        """This rank makes `call`."""
        self._latest = call

    @property
    def is_told(self) -> bool:
        """Whether the others can know of this rank's latest call."""
        return self._told == self._latest

    def tell(self, at_once: bool = False) -> None:
        """Tells the others, if it is time to."""
        now = time.monotonic()
        if not self.is_told and (at_once or now - self._told_at > _EVERY_S):
            self._told, self._told_at = self._latest, now
            with contextlib.suppress(StoreError):  # without a store nobody is there to read it
                self._store.set(str(self._at), json.dumps(self._told))

    def missing(self, call: HeaderFields) -> list[int]:
        """The places of those that did not come to `call`; gives those that have just come the time to tell."""
        self.tell(at_once=True)
        time.sleep(2 * _EVERY_S)
        return [place for place, (sequence, *_) in enumerate(self.latest()) if sequence < call[0]]

    def latest(self) -> list[HeaderFields]:
        """Everybody's latest call, as far as it was told."""
        calls = [_NO_CALL] * self._size
        with contextlib.suppress(StoreError):
            for place in range(self._size):
                if self._store.check([str(place)]):
                    calls[place] = _parse(self._store.get(str(place)))
        return calls


def _parse(told: bytes) -> HeaderFields:
    sequence, operation, dtype, reduce_op, root, count = json.loads(told)
    return sequence, operation, dtype, reduce_op, root, count
