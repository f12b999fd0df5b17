"""`SerialChannel`, the base class for the channels of engines that can execute only one call at a time.

The channel runs a group's calls one at a time: synchronous calls on the caller's thread, and all other calls on its own
thread. `WaitedMessage` supports libraries that report the completion of a message only to a waiting thread; it uses one
thread for each background message.
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder, RecordedWork
from paceline.comm.engine.adapters.library_engine import FailureDiagnosis
from paceline.comm.engine.adapters.schedule_executor import FlatBuffer
from paceline.comm.engine.channel import (
    CallFailure,
    CallOutcome,
    CollectiveCall,
    EngineChannel,
    HeaderFields,
    OutcomeCode,
    Pieces,
    code_of,
)
from paceline.durations import LONGEST_S, event_timeout_s, to_nanoseconds

MESSAGE_HEAD = struct.Struct("<qq")  # number of bytes, dtype code


class _WaitableCall:
    """Implements `channel.PendingCall` for a call or a message that another thread completes with `end`."""

    def __init__(self) -> None:
        self._completed = threading.Event()
        self._outcome: CallOutcome | None = None

    def end(self, outcome: CallOutcome | None) -> None:
        """Marks the call as complete."""
        self._outcome = outcome
        self._completed.set()

    def done(self) -> bool:
        """Returns True if the call is complete."""
        return self._completed.is_set()

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits for the call to complete; returns False on timeout."""
        return self._completed.wait(event_timeout_s(timeout_ns))

    def outcome(self) -> CallOutcome | None:
        """Returns the reason why the call failed, or None if it succeeded."""
        return self._outcome


class WaitedMessage(_WaitableCall):
    """A message that completes only while a thread waits for it; implements `channel.PendingMessage`.

    Args:
        finish: a function that waits for the message and returns the sender's group rank and the outcome.
        recorded: the message's entry in the recording.
        background: whether the message proceeds without a call to `wait`.
    """

    def __init__(
        self, finish: Callable[[], tuple[int, CallOutcome | None]], recorded: RecordedWork, background: bool
    ) -> None:
        super().__init__()
        self._finish = finish
        self._recorded = recorded
        self._waiting = threading.Lock()
        self._source = -1
        self._background = background
        if background:
            threading.Thread(target=self._run, name="paceline-message", daemon=True).start()

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits for the message to complete; returns False on timeout."""
        if not self._background:
            self._run()
        return super().wait(timeout_ns)

    def source(self) -> int:
        """Returns the sender's group rank, or -1 while it is unknown."""
        return self._source

    def _run(self) -> None:
        with self._waiting:
            if not self._completed.is_set():
                self._source, outcome = self._finish()
                self._recorded.end_from(self._source, code_of(outcome))
                self.end(outcome)


def message_mismatch(source: int, receiver: int, sent: tuple[int, int], expected: tuple[int, int]) -> CallFailure:
    """Returns the failure for a message whose size and dtype (`sent`) differ from those of the receive (`expected`)."""
    return CallFailure(
        OutcomeCode.MISMATCH,
        split_from=source,
        split_to=receiver,
        split_sent=sent[0],
        split_expected=expected[0],
        calls=[(0, 0, sent[1], 0, 0, 0), (0, 0, expected[1], 0, 0, 0)],
    )


class Envelope:
    """A message in a separate buffer, with a header that contains the size and dtype for the receiver to check."""

    def __init__(self, dtype: int, pieces: Pieces) -> None:
        self._buffer = FlatBuffer([pieces])
        self._head = (self._buffer.nbytes, dtype)
        self._memory = bytearray(MESSAGE_HEAD.size + self._buffer.nbytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self) -> Envelope:
        """Writes the header and the tensor into the buffer before a send; returns this envelope."""
        MESSAGE_HEAD.pack_into(self._memory, 0, *self._head)
        self.tensor[MESSAGE_HEAD.size :].copy_(self._buffer.copy_in().tensor())
        return self

    def open(self, source: int, receiver: int) -> CallOutcome | None:
        """Copies a received message into the tensor; returns None, or the reason why the two do not match."""
        sent = MESSAGE_HEAD.unpack_from(self._memory)
        if sent != self._head:
            return message_mismatch(source, receiver, sent, self._head)
        self._buffer.tensor().copy_(self.tensor[MESSAGE_HEAD.size :])
        self._buffer.copy_out()
        return None


_HISTORY = 16  # the number of calls remembered for a diagnosis


class LibraryError(Exception):
    """The library rejected a call or failed during the call; the message is the library's own."""


class CallTimeout(Exception):
    """A call did not complete before its deadline."""


class CallEnded(Exception):
    """A call failed with a known outcome, so no diagnosis is needed."""

    def __init__(self, outcome: CallOutcome) -> None:
        super().__init__()
        self.outcome = outcome


class QueuedCall(_WaitableCall):
    """A call in a `SerialChannel`'s queue."""

    def __init__(self, call: CollectiveCall, recorded: RecordedWork) -> None:
        super().__init__()
        self.call = call
        self.recorded = recorded


class SerialChannel(HasRecorder, EngineChannel, ABC):
    """An `EngineChannel` for which an engine needs to implement only `perform`.

    A failed call breaks the group, so all later calls fail with the same outcome.
    """

    def __init__(self, diagnosis: FailureDiagnosis) -> None:
        self._diagnosis = diagnosis
        self._rank, self._size = diagnosis.rank, len(diagnosis.members)
        self._turn = threading.Lock()
        self._waiting: deque[QueuedCall] = deque()  # the first call in the queue is running
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sequence = 0
        self._history: deque[HeaderFields] = deque(maxlen=_HISTORY)
        self._broken: CallOutcome | None = None
        self._recorder = GroupRecorder(diagnosis.members, diagnosis.rank)

    @abstractmethod
    def perform(self, call: CollectiveCall) -> None:
        """Runs a call to completion within `call.timeout_ns`.

        Raises:
            CallTimeout: the call did not complete in time.
            LibraryError: the library rejected the call or failed.
        """

    def run(self, call: CollectiveCall, /) -> CallOutcome | None:
        """Runs a call to completion; returns None on success."""
        if not self._waiting:
            with self._turn:
                if not self._waiting:
                    return self._perform(call, self._recorder.call(call, is_async=False))
        turn = self._queue(call)
        turn.wait(to_nanoseconds(LONGEST_S))
        return turn.outcome()

    def submit(self, call: CollectiveCall, /) -> QueuedCall:
        """Queues a call after the earlier ones and returns immediately."""
        return self._queue(call)

    def abort(self) -> None:
        """Aborts queued and later calls. A call that is already running in the library continues until it times out.

        The other ranks detect that this rank has left when their own calls fail.
        """
        if self._broken is None:
            self._broken = CallFailure(OutcomeCode.ABORTED)
        self.close()

    def failure(self) -> int:
        """Returns the code of the failure that broke the channel, or OK."""
        return code_of(self._broken)

    def close(self) -> None:
        """Reports to the other ranks that this rank has left, and cancels the queued calls; idempotent."""
        if self._broken is None:
            self._broken = CallFailure(OutcomeCode.INTERRUPTED)
        self._diagnosis.leave()
        with self._arrived:
            self._arrived.notify()

    def _queue(self, call: CollectiveCall) -> QueuedCall:
        turn = QueuedCall(call, self._recorder.call(call, is_async=True))
        with self._arrived:
            self._waiting.append(turn)
            if self._thread is None:
                self._thread = threading.Thread(target=self._take_turns, name="paceline-turns", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return turn

    def _take_turns(self) -> None:
        while True:
            with self._arrived:
                while not self._waiting:
                    if self._broken is not None:
                        self._thread = None
                        return
                    self._arrived.wait()
            with self._turn:
                outcome = self._perform(self._waiting[0].call, self._waiting[0].recorded)
            self._waiting.popleft().end(outcome)

    def _perform(self, call: CollectiveCall, recorded: RecordedWork) -> CallOutcome | None:
        recorded.start()
        outcome = self._outcome_of(call)
        recorded.end(code_of(outcome))
        return outcome

    def _outcome_of(self, call: CollectiveCall) -> CallOutcome | None:
        if self._broken is not None:
            return self._broken
        self._note(call.operation, call.dtype, call.reduce_op, call.root, call.count)
        started_ns = time.monotonic_ns()
        try:
            self.perform(call)
            return None
        except Exception as error:  # an error that escaped the channel's thread would go unnoticed
            return self._break(error, started_ns)

    def _note(self, operation: int, dtype: int, reduce_op: int, root: int, count: int) -> None:
        self._sequence += 1
        self._history.append((self._sequence, operation, dtype, reduce_op, root, count))

    def _break(self, error: Exception, started_ns: int) -> CallOutcome:
        if self._broken is not None and self._broken.code == OutcomeCode.ABORTED:
            return self._broken
        if isinstance(error, CallEnded):
            self._broken = error.outcome
            return error.outcome
        detail = (
            "" if isinstance(error, CallTimeout) else f"{error}" if isinstance(error, LibraryError) else f"{error!r}"
        )
        self._broken = self._diagnosis.diagnose(self._history, detail, time.monotonic_ns() - started_ns)
        return self._broken
