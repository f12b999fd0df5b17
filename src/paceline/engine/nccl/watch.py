"""A thread that looks after calls which are under way, since nobody waits for them: the program's streams do."""

from __future__ import annotations

import threading

from paceline.engine.nccl.call_stream import CallStream

_EVERY_S = 0.05


class Watch:
    """Looks at `streams` for as long as one of them has a call under way; ended by `close`."""

    def __init__(self) -> None:
        self._streams: list[CallStream] = []
        self._called = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-nccl-watch", daemon=True)
        self._thread.start()

    def add(self, calls: CallStream) -> None:
        """Looks after `calls` from now on."""
        self._streams = [*self._streams, calls]

    def remove(self, calls: CallStream) -> None:
        """Leaves it alone."""
        self._streams = [each for each in self._streams if each is not calls]

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
            for calls in self._streams:
                if calls.look():
                    self._called.set()
