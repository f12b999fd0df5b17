"""`StagedMessages`, which stages each message with accelerator tensors in a host buffer of the same size.

A receive begins immediately; the copy to the device is enqueued when the program waits for the receive or polls it. A
send begins when the copy to the host is complete, on the thread that is waiting for the send or, for background sends,
on the group's own thread. Sends begin in the order in which they were requested.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from paceline.comm.engine.adapters.device_streams import (
    AcceleratorEvent,
    AcceleratorStream,
    activated,
    is_capturing,
    record_current,
)
from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder, RecordedWork
from paceline.comm.engine.channel import (
    CallFailure,
    CallOutcome,
    Messages,
    OutcomeCode,
    PendingMessage,
    Pieces,
    code_of,
)
from paceline.comm.engine.staged.memory import DeviceBytes, copy_to_device, copy_to_host, pinned_bytes

_PAUSE_S = 50e-6


class OutgoingDeviceMessage:
    """A send in progress; see `engine.channel.PendingMessage`.

    Args:
        copied: the event recorded after the copy to host memory.
        host: the host memory, kept until the message is complete.
        start: a function that begins sending the host memory.
        advance: a function that begins, in order, all of the group's sends that are ready.
        timeout_ns: the time limit for the copy and, separately, for the message, in nanoseconds.
    """

    def __init__(
        self,
        copied: AcceleratorEvent,
        host: torch.Tensor,
        start: Callable[[], PendingMessage],
        advance: Callable[[], None],
        rank: int,
        timeout_ns: int,
        recorded: RecordedWork,
    ) -> None:
        self._copied = copied
        self._host = host
        self._start: Callable[[], PendingMessage] | None = start
        self._advance = advance
        self._rank = rank
        self._timeout_ns = timeout_ns
        self._recorded: RecordedWork | None = recorded
        self._created_ns = time.monotonic_ns()
        self._message: PendingMessage | None = None
        self._failure: CallOutcome | None = None

    def begin(self) -> bool:
        """Begins the message once its data is copied, or fails it if the copy is late; returns False until then."""
        if self._message is None and self._failure is None:
            if self._copied.done():
                assert self._start is not None
                self._message, self._start = self._start(), None
            elif time.monotonic_ns() - self._created_ns > self._timeout_ns:
                late_ns = self._timeout_ns
                self.fail(CallFailure(OutcomeCode.TIMED_OUT, missing=[self._rank], has_begun=True, waited_ns=late_ns))
        return self._message is not None or self._failure is not None

    def fail(self, failure: CallOutcome) -> None:
        """Marks the message as failed; the message must not have begun."""
        self._failure, self._start = failure, None

    def done(self) -> bool:
        """Returns True if the message is complete, successfully or not."""
        self._advance()
        is_over = self._failure is not None or (self._message is not None and self._message.done())
        if is_over:
            self._end()
        return is_over

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits until the message is complete; returns False on timeout."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        while self._message is None and self._failure is None:
            self._advance()
            if self._message is None and self._failure is None:
                if time.monotonic_ns() > deadline_ns:
                    return False
                time.sleep(_PAUSE_S)
        if self._message is not None and not self._message.wait(max(0, deadline_ns - time.monotonic_ns())):
            return False
        self._end()
        return True

    def outcome(self) -> CallOutcome | None:
        """Returns the reason why the message failed, or None if it succeeded."""
        return self._failure if self._message is None else self._message.outcome()

    def source(self) -> int:
        """Returns -1, because the message is a send."""
        return -1

    def _end(self) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.end(code_of(self.outcome()))


class IncomingDeviceMessage:
    """A receive in progress; see `engine.channel.PendingMessage`.

    Args:
        message: the receive into `host`.
        host: the message's host memory.
        target: the memory on the device.
        stream: the stream for copies to the device.
        start: the event recorded after the program's earlier work on this memory.
    """

    def __init__(
        self,
        message: PendingMessage,
        host: torch.Tensor,
        target: DeviceBytes,
        stream: AcceleratorStream,
        start: AcceleratorEvent,
        recorded: RecordedWork,
    ) -> None:
        self._message = message
        self._host = host
        self._target = target
        self._stream = stream
        self._start = start
        self._recorded = recorded
        self._lock = threading.Lock()
        self._copied: AcceleratorEvent | None = None

    def done(self) -> bool:
        """Returns True if the message has failed or its values are on the device."""
        if not self._message.done():
            return False
        copied = self._copy()
        return copied is None or copied.done()

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits for the message and makes the current stream wait for the copy; returns False on timeout."""
        if not self._message.wait(timeout_ns):
            return False
        copied = self._copy()
        if copied is not None:
            copied.order()
        return True

    def outcome(self) -> CallOutcome | None:
        """Returns the reason why the message failed, or None if it succeeded."""
        return self._message.outcome()

    def source(self) -> int:
        """Returns the group rank of the sender, or -1 while it is unknown."""
        return self._message.source()

    def is_copied(self) -> bool:
        """Returns True if the copy to the device is complete or has not been enqueued yet."""
        return self._copied is None or self._copied.done()

    def _copy(self) -> AcceleratorEvent | None:
        """Enqueues the copy once; returns the event recorded after the copy, or None if the message failed."""
        with self._lock:
            if self._copied is None:
                failure = self._message.outcome()
                self._recorded.end_from(self._message.source(), code_of(failure))
                if failure is not None:
                    return None
                self._stream.follow(self._start)
                with self._stream.current():
                    copy_to_device(self._target.part(0, self._target.nbytes), self._host)
                self._copied = self._stream.record()
        return self._copied


class StagedMessages(HasRecorder, Messages):
    """Messages with device tensors over `inner`; see `engine.channel.Messages`.

    Args:
        inner: the same ranks' messages for CPU tensors. It must not be used elsewhere, and is not closed by this
            object.
    """

    def __init__(self, inner: Messages, device: torch.device, recorder: GroupRecorder, rank: int) -> None:
        self._inner = inner
        self._device = device
        self._recorder = recorder
        self._rank = rank
        self._to_host = AcceleratorStream(device)
        self._to_device = AcceleratorStream(device)
        self._waiting: deque[OutgoingDeviceMessage] = deque()
        self._turn = threading.Lock()  # held while sends begin, to preserve their order
        self._arrived = threading.Event()
        self._thread: threading.Thread | None = None
        self._receives: list[IncomingDeviceMessage] = []  # keeps alive the memory that the device may still write to
        self._failure: CallOutcome | None = None

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> OutgoingDeviceMessage:
        """Starts a send to a group rank."""
        self._require_no_capture("send")
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        source = DeviceBytes(tensor)
        host = pinned_bytes(source.nbytes, self._device)
        self._to_host.follow()
        with self._to_host.current():
            copy_to_host(host, source.part(0, source.nbytes))

        def start() -> PendingMessage:
            return self._inner.send(peer, tag, dtype, [host.data_ptr(), host.nbytes], timeout_ns, background)

        send = OutgoingDeviceMessage(
            self._to_host.record(), host, start, self._advance, self._rank, timeout_ns, recorded
        )
        if self._failure is not None:
            send.fail(self._failure)
            return send
        self._waiting.append(send)
        if background:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_in_turn, name="paceline-staged-sends", daemon=True)
                self._thread.start()
            self._arrived.set()
        return send

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> IncomingDeviceMessage:
        """Starts a receive from a group rank, or from any rank if `peer` is -1."""
        self._require_no_capture("recv")
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        target = DeviceBytes(tensor)
        host = pinned_bytes(target.nbytes, self._device)
        start = record_current(self._device)
        message = self._inner.receive(peer, tag, dtype, [host.data_ptr(), host.nbytes], timeout_ns, background)
        receive = IncomingDeviceMessage(message, host, target, self._to_device, start, recorded)
        self._receives = [*(earlier for earlier in self._receives if not earlier.is_copied()), receive]
        return receive

    def close(self, failure: CallOutcome) -> None:
        """Marks sends that have not begun, and all later messages, as failed; idempotent."""
        with self._turn:
            self._failure = failure if self._failure is None else self._failure
            while self._waiting:
                self._waiting.popleft().fail(self._failure)
        self._arrived.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _advance(self) -> None:
        """Begins the sends whose copies are complete, in order."""
        with self._turn:
            while self._waiting and self._waiting[0].begin():
                self._waiting.popleft()

    def _send_in_turn(self) -> None:
        with activated(self._device):
            while self._failure is None:
                self._advance()
                if self._waiting:
                    time.sleep(_PAUSE_S)
                else:
                    self._arrived.wait()
                    self._arrived.clear()

    def _require_no_capture(self, call: str) -> None:
        if is_capturing(self._device):
            raise RuntimeError(capture_text(call, self._device))


def capture_text(call: str, device: torch.device) -> str:
    """Returns the error message for a call during graph capture."""
    return (
        f"{call} of tensors on {device} was called while a graph is captured, but these tensors are copied through "
        "host memory, which a graph cannot replay; call it outside the graph, or use backend='nccl'"
    )
