"""Publishes each rank's latest call on a call stream in the store, so that a time-out can name the missing ranks."""

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
    """Publishes this rank's latest call, at most twice a second, and reads the other ranks'."""

    def __init__(self, store: Store, at: int, size: int) -> None:
        self._store = store
        self._at = at
        self._size = size
        self._latest = _NO_CALL
        self._told = _NO_CALL
        self._told_at = time.monotonic()

    def arrive(self, call: HeaderFields) -> None:
        """Notes that this rank makes `call`; `tell` publishes it later."""
        self._latest = call

    @property
    def is_told(self) -> bool:
        """Whether this rank's latest call has been published."""
        return self._told == self._latest

    def tell(self, at_once: bool = False) -> None:
        """Publishes the latest call, unless it did so less than half a second ago and `at_once` is false."""
        now = time.monotonic()
        if not self.is_told and (at_once or now - self._told_at > _EVERY_S):
            self._told, self._told_at = self._latest, now
            with contextlib.suppress(StoreError):  # without a store, no rank is left to read it
                self._store.set(str(self._at), json.dumps(self._told))

    def missing(self, call: HeaderFields) -> list[int]:
        """Returns the places of ranks that have not made `call`; first gives late ranks one second to publish it."""
        self.tell(at_once=True)
        time.sleep(2 * _EVERY_S)
        return [place for place, (sequence, *_) in enumerate(self.latest()) if sequence < call[0]]

    def latest(self) -> list[HeaderFields]:
        """Returns each rank's latest published call, by place."""
        calls = [_NO_CALL] * self._size
        with contextlib.suppress(StoreError):
            for place in range(self._size):
                if self._store.check([str(place)]):
                    calls[place] = _parse(self._store.get(str(place)))
        return calls


def _parse(told: bytes) -> HeaderFields:
    sequence, operation, dtype, reduce_op, root, count = json.loads(told)
    return sequence, operation, dtype, reduce_op, root, count
