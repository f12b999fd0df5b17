"""A thread that watches calls in progress, since the program's streams wait for them but none of its threads does."""

from __future__ import annotations

import threading

from paceline.engine.nccl.call_stream import CallStream

_EVERY_S = 0.05


class Watch:
    """Looks at call streams for as long as one of them has a call in progress, until `close` is called."""

    def __init__(self) -> None:
        self._streams: list[CallStream] = []
        self._called = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-nccl-watch", daemon=True)
        self._thread.start()

    def add(self, calls: CallStream) -> None:
        """Starts watching `calls`."""
        self._streams = [*self._streams, calls]

    def remove(self, calls: CallStream) -> None:
        """Stops watching `calls`."""
        self._streams = [each for each in self._streams if each is not calls]

    def wake(self) -> None:
        """Tells the thread that there is a new call."""
        self._called.set()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._closing.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()  # before the pause: `close` may come at any time after it
            if self._closing.wait(_EVERY_S):
                return
            for calls in self._streams:
                if calls.look():
                    self._called.set()
