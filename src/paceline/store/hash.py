"""A store within one process, for threads and tests."""

from __future__ import annotations

import threading

from paceline import _core
from paceline.durations import Timeout
from paceline.store.base import DEFAULT_TIMEOUT, Answer, Op, Status, Store


class HashStore(Store):
    """A store in this process's memory; its threads share it.

    >>> store = HashStore()
    >>> store.add("steps", 2)
    2
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = _core.StoreTable()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return "HashStore()"

    def _apply(self, op: Op, number: int, fields: list[bytes], timeout_s: float) -> Answer:
        with self._changed:
            done = self._changed.wait_for(lambda: self._try(op, number, fields), timeout_s)
            if done is None:
                return Status.TIMED_OUT, 0, self._table.missing(op, fields)
            self._changed.notify_all()
            return done

    def _try(self, op: Op, number: int, fields: list[bytes]) -> Answer | None:
        done = self._table.apply(op, number, fields)
        return None if done is None else (Status(done[0]), done[1], done[2])
