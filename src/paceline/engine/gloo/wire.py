"""Bare sends and receives over gloo, as schedules need them, and gloo's errors as the adapters know them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import distributed_c10d as c10d

from paceline.engine.adapters.flat_buffer import tensor_at
from paceline.engine.adapters.serial_channel import CallTimeout, LibraryError

SHORTEST = timedelta(milliseconds=1)  # of gloo's time-outs, which count milliseconds
_ROUNDED_NS = 1_000_000  # by so much gloo's wait, in whole milliseconds, ends before its deadline
_COLLECTIVES_TAG = 0  # the program's messages have tags from 1 on


class GlooTransfer:
    """A message in progress; see `adapters.executor.Transfer`."""

    def __init__(self, work: c10d.Work) -> None:
        self._work = work

    def wait(self, deadline_ns: int) -> None:
        """Waits until the message has been sent or received, or the deadline of the monotonic clock has passed."""
        remaining = timedelta(microseconds=(deadline_ns - time.monotonic_ns()) / 1000)
        with translated(deadline_ns):
            self._work.wait(max(SHORTEST, remaining))


class GlooWire:
    """The messages of schedules; see `adapters.executor.Wire`."""

    def __init__(self, group: c10d.ProcessGroupGloo) -> None:
        self._group = group

    def send(self, peer: int, address: int, nbytes: int) -> GlooTransfer:
        """Starts a send to a group rank."""
        return GlooTransfer(self._group.send([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))

    def receive(self, peer: int, address: int, nbytes: int) -> GlooTransfer:
        """Starts a receive from a group rank."""
        return GlooTransfer(self._group.recv([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))


@contextlib.contextmanager
def translated(deadline_ns: int) -> Iterator[None]:
    """Turns gloo's errors, which are all RuntimeErrors, into `CallTimeout` or `LibraryError`."""
    try:
        yield
    except RuntimeError as error:
        if time.monotonic_ns() >= deadline_ns - _ROUNDED_NS:
            raise CallTimeout from error
        raise LibraryError(str(error)) from error
