"""Signals that ask a process to end, which is to save a checkpoint first."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class EndingSignals:
    """Notes a SIGTERM, so that the loop ends at a place of its own choice; a second one ends the process at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: signal._HANDLER = None
        # Elsewhere, signals cannot be handled, and whoever runs the loop in a thread must pass them on.
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._before = signal.signal(signal.SIGTERM, self._note)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that was asked to end and did, as shells give it."""
        return 128 + signal.SIGTERM

    def close(self) -> None:
        """Puts the handler back that was there before, unless another one has taken its place; idempotent."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._is_installed = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.came:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.came = True
