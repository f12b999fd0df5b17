"""Messages over libraries that report completion only to a waiting thread; a background message has its own thread."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import torch

from paceline.durations import for_event
from paceline.engine.adapters.flat_buffer import FlatBuffer
from paceline.engine.adapters.recording import RecordedWork
from paceline.engine.channel import Outcome, Pieces
from paceline.engine.failures import Code, Failure

_HEAD = struct.Struct("<qq")  # number of bytes, dtype code


class WaitedMessage:
    """A `channel.Message`.

    Args:
        finish: waits until it is over, then returns the sender's group rank and the outcome.
        recorded: its record.
        background: whether it goes on by itself.
    """

    def __init__(
        self, finish: Callable[[], tuple[int, Outcome | None]], recorded: RecordedWork, background: bool
    ) -> None:
        self._finish = finish
        self._recorded = recorded
        self._over = threading.Event()
        self._waiting = threading.Lock()
        self._source = -1
        self._outcome: Outcome | None = None
        self._background = background
        if background:
            threading.Thread(target=self._run, name="paceline-message", daemon=True).start()

    def done(self) -> bool:
        """Returns whether the message is over."""
        return self._over.is_set()

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits until the message is over; returns False if the time was over first."""
        if not self._background:
            self._run()
        return self._over.wait(for_event(timeout_ns))

    def outcome(self) -> Outcome | None:
        """Returns why the message failed, or None if it succeeded."""
        return self._outcome

    def source(self) -> int:
        """Returns the sender's group rank; -1 as long as it is unknown."""
        return self._source

    def _run(self) -> None:
        with self._waiting:
            if not self._over.is_set():
                self._source, self._outcome = self._finish()
                self._recorded.end_from(self._source, Code.OK if self._outcome is None else self._outcome.code)
                self._over.set()


class Envelope:
    """A message with a size-and-dtype header, in its own buffer, so that the receiver can check it before copying."""

    def __init__(self, dtype: int, pieces: Pieces) -> None:
        self._stretch = FlatBuffer([pieces])
        self._head = (self._stretch.nbytes, dtype)
        self._memory = bytearray(_HEAD.size + self._stretch.nbytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self) -> Envelope:
        """Writes the header and copies the tensor in, for a send; returns this envelope."""
        _HEAD.pack_into(self._memory, 0, *self._head)
        self.tensor[_HEAD.size :].copy_(self._stretch.copy_in().tensor())
        return self

    def open(self, source: int, receiver: int) -> Outcome | None:
        """Copies a received message into the tensor and returns None, or returns why the message does not fit."""
        (nbytes, dtype), (expected, expected_dtype) = _HEAD.unpack_from(self._memory), self._head
        if (nbytes, dtype) != self._head:
            return Failure(
                Code.MISMATCH,
                split_from=source,
                split_to=receiver,
                split_sent=nbytes,
                split_expected=expected,
                calls=[(0, 0, dtype, 0, 0, 0), (0, 0, expected_dtype, 0, 0, 0)],
            )
        self._stretch.tensor().copy_(self.tensor[_HEAD.size :])
        self._stretch.copy_out()
        return None
