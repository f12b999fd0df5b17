"""Watches whether the ranks of this machine are alive, since NCCL itself waits for a dead rank forever."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from paceline.engine.nccl.meeting import Presence


class Peers:
    """Watches the processes in `presences` that run on this machine, except the calling one, which is in place `at`."""

    def __init__(self, presences: Sequence[Presence], at: int) -> None:
        self._places: dict[int, int] = {}
        self._gone: set[int] = set()
        self._poll = select.poll()
        for place, presence in enumerate(presences):
            if place == at or presence.machine != presences[at].machine:
                continue
            try:
                descriptor = os.pidfd_open(presence.pid)
            except ProcessLookupError:
                self._gone.add(place)
                continue
            self._places[descriptor] = place
            self._poll.register(descriptor, select.POLLIN)

    def gone(self) -> list[int]:
        """Returns the places of the watched processes that have ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        self._gone.update(place for descriptor, place in tuple(self._places.items()) if descriptor in ended)
        return sorted(self._gone)

    def close(self) -> None:
        """Stops watching; idempotent."""
        for descriptor in self._places:
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            os.close(descriptor)
        self._places.clear()
