"""A thread that looks after calls which are under way, since nobody waits for them: the program's streams do."""

from __future__ import annotations

import threading

from paceline.engine.nccl.line import Line

_EVERY_S = 0.05


class Watch:
    """Looks at `lines` for as long as one of them has a call under way; ended by `close`."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._called = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-nccl-watch", daemon=True)
        self._thread.start()

    def add(self, line: Line) -> None:
        """Looks after `line` from now on."""
        self._lines = [*self._lines, line]

    def remove(self, line: Line) -> None:
        """Leaves it alone."""
        self._lines = [each for each in self._lines if each is not line]

    def wake(self) -> None:
        """There is a new call."""
        self._called.set()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._closing.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._called.wait()
            if self._closing.wait(_EVERY_S):
                return
            self._called.clear()
            for line in self._lines:
                if line.look():
                    self._called.set()
