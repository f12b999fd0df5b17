"""Watches whether the ranks of this machine are alive, since NCCL itself waits for a dead rank forever."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from paceline.engine.nccl.meeting import Presence
from paceline.engine.processes import Process
from paceline.system_calls import pidfd_open


class Peers:
    """Watches the processes in `presences` that run on this machine, except the calling one, which is in place `at`."""

    def __init__(self, presences: Sequence[Presence], at: int) -> None:
        self._places: dict[int, int] = {}
        self._looked_for: dict[int, Process] = {}  # where the kernel gives no descriptor, by place
        self._gone: set[int] = set()
        self._poll = select.poll()
        for place, presence in enumerate(presences):
            if place == at or presence.machine != presences[at].machine:
                continue
            try:
                descriptor = self._open(place, presence.pid)
            except ProcessLookupError:
                self._gone.add(place)
                continue
            if descriptor is None:
                continue
            self._places[descriptor] = place
            self._poll.register(descriptor, select.POLLIN)

    def _open(self, place: int, pid: int) -> int | None:
        try:
            return pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            self._looked_for[place] = Process.of(pid)
            return None

    def gone(self) -> list[int]:
        """Returns the places of the watched processes that have ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        self._gone.update(place for descriptor, place in tuple(self._places.items()) if descriptor in ended)
        self._gone.update(place for place, process in self._looked_for.items() if process.has_ended())
        return sorted(self._gone)

    def close(self) -> None:
        """Stops watching; idempotent."""
        for descriptor in self._places:
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            os.close(descriptor)
        self._places.clear()
