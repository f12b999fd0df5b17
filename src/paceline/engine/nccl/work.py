"""Calls and messages in progress, for the group to wait for."""

from __future__ import annotations

import threading
import time

from paceline.durations import for_event
from paceline.engine.failures import Failure
from paceline.engine.nccl.call_stream import CallStream, Flight

# A time-out of this length or more is no limit: the program's stream waits for the call, and its thread goes on.
_NO_LIMIT_NS = 1 << 61
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.001


class NcclWork:
    """A call that was enqueued on `calls`, or the reason why it was not."""

    def __init__(self, calls: CallStream, given: Flight | Failure) -> None:
        self._calls = calls
        self._given = given
        self._went_well = False

    def done(self) -> bool:
        """Whether it is over, well or not."""
        if self._failure() is not None:
            return True
        assert isinstance(self._given, Flight)
        # The mark is read before the failure is, since an abort also ends what is on the stream.
        passed = self._given.mark.done()
        self._went_well = passed and self._calls.failure is None
        return passed

    def wait(self, timeout_ns: int) -> bool:
        """Makes the current stream wait for the call, and with a time-out the thread; returns False if it timed out."""
        if timeout_ns < _NO_LIMIT_NS and not self.finish(timeout_ns):
            return False
        self.order()
        return True

    def order(self) -> None:
        """Makes the current stream wait until the call is over."""
        if isinstance(self._given, Flight):
            self._given.mark.order()

    def finish(self, timeout_ns: int) -> bool:
        """Makes the thread wait until the call is over; returns False if the time was over first."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        pause_s = _FIRST_PAUSE_S
        while not self.done():
            if time.monotonic_ns() > deadline_ns:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def outcome(self) -> Failure | None:
        """Why it failed, as far as that is known by now."""
        return self._failure()

    def _failure(self) -> Failure | None:
        if isinstance(self._given, Failure):
            return self._given
        return None if self._went_well else self._calls.failure


class NcclMessage:
    """A send or a receive, which a lane's thread enqueues on its call stream."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._arrived = threading.Event()
        self._work: NcclWork | None = None

    def arrive(self, work: NcclWork) -> None:
        """Marks the message as enqueued on its call stream."""
        self._work = work
        self._arrived.set()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._work is not None and self._work.done()

    def wait(self, timeout_ns: int) -> bool:
        """Waits until the call stream is open, for which the other rank must come, and then as `NcclWork.wait`."""
        started_ns = time.monotonic_ns()
        if not self._arrived.wait(for_event(timeout_ns)):
            return False
        assert self._work is not None
        limited = timeout_ns < _NO_LIMIT_NS
        return self._work.wait(timeout_ns - (time.monotonic_ns() - started_ns) if limited else timeout_ns)

    def outcome(self) -> Failure | None:
        """Why it failed, as far as that is known by now."""
        return None if self._work is None else self._work.outcome()

    def source(self) -> int:
        """Returns the sender's group rank."""
        return self._source
