"""Keeps rank 0's store open for a while after a failed meeting, so that ranks that come late hear why."""

from __future__ import annotations

import contextlib
import threading
import time

from paceline.errors import StoreError
from paceline.rendezvous.check_in import have_heard
from paceline.store.base import Store

_STAYS_S = 5.0
_POLL_S = 0.05

_staying: list[_Stay] = []


class _Stay(threading.Thread):
    """Closes a store late. It is no daemon thread: the interpreter must wait for it, as late ranks need the store."""

    def __init__(self, opened: Store, meeting: Store) -> None:
        super().__init__(name="paceline-late-ranks")
        self._opened = opened
        self._meeting = meeting
        self._over = threading.Event()
        _staying.append(self)

    def run(self) -> None:
        deadline = time.monotonic() + _STAYS_S
        with contextlib.suppress(StoreError):
            while not have_heard(self._meeting, all_ranks=True) and time.monotonic() < deadline:
                if self._over.wait(_POLL_S):
                    break
        self._opened.close()
        _staying.remove(self)

    def end(self) -> None:
        self._over.set()
        self.join()


def stay(opened: Store, meeting: Store) -> None:
    """Closes `opened` in the background, when all ranks have heard how `meeting` ended in it, or after 5 s."""
    _Stay(opened, meeting).start()


def end_staying() -> None:
    """Closes the stores that are still open, since another meeting begins."""
    for each in list(_staying):
        each.end()
