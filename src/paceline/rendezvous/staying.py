"""A store that rank 0 serves stays for a while after a meeting that failed, so that ranks that come late hear why."""

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
    """No daemon: the interpreter waits for it at its end, as the late ranks would for a store that has gone."""

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
    """Closes `opened` when all ranks have heard how the `meeting` in it ended, or after 5 s; does not wait for that."""
    _Stay(opened, meeting).start()


def end_staying() -> None:
    """Closes the stores that stay, since another meeting begins."""
    for each in list(_staying):
        each.end()
