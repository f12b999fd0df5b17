"""`GroupRecorder`, which records a rank's calls and messages in a group whose engine is not part of the core.

A library reports neither the data that it sends nor the rank that arrived last. The bytes recorded for a call are
therefore the rank's contribution. They are counted as traffic within the host if the whole group is on one host, and as
traffic between hosts otherwise.

An operation on a device is recorded with times measured by the device and converted to the recording's clock (see
`RecordedWork.follow`). Two events on the device's streams enclose the operation. No thread blocks on these events: one
thread in the process (`DeviceWatch`) polls them at intervals and converts the times of completed events. A
`DeviceClock` for each device relates the device's time to the host's, using events on an otherwise idle stream, where
they complete immediately.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent, AcceleratorStream, polled
from paceline.comm.engine.channel import ITEM_SIZES, NO_REDUCTION, CollectiveCall, OutcomeCode, Pieces
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.record.layout import RECEIVE, SEND
from paceline.comm.schedule.steps import Operation

_READING_S = 10.0  # maximum age of a reading; beyond it, float32 rounding of device times exceeds 1 us
_NARROW_NS = 100_000
_ATTEMPTS = 5
_LONGEST_READING_NS = 100_000_000
_RETRY_NS = 2_000_000_000
_POLLING_S = 0.02


class DeviceClock:
    """Converts the times of a device's events to the recording's ticks; thread-safe.

    The clock's stream may be behind other work: PyTorch has only 32 streams per device and priority, and with
    CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue of the hardware. That work may be a call that waits for
    other ranks, and the threads that read the clock also enforce timeouts. A reading therefore never waits for long.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = AcceleratorStream(device)
        self._origin: tuple[AcceleratorEvent, int] | None = None  # an event and its completion time in ns
        self._next_reading_ns = 0
        self._lock = threading.Lock()

    def tick_of(self, event: AcceleratorEvent) -> int:
        """Returns the tick at which an event completed; the event must be complete and recorded with `timing`.

        If the device's time could not be read yet, returns the current tick.
        """
        with self._lock:
            if time.monotonic_ns() >= self._next_reading_ns:
                reading = self._read()
                self._origin = self._origin if reading is None else reading
                pause_ns = _RETRY_NS if reading is None else round(_READING_S * 1e9)
                self._next_reading_ns = time.monotonic_ns() + pause_ns
            if self._origin is None:
                return _core.record_tick_at(time.monotonic_ns())
            origin, monotonic_ns = self._origin
            after_s = origin.elapsed_s(event)
        return _core.record_tick_at(monotonic_ns + round(after_s * 1e9))

    def _read(self) -> tuple[AcceleratorEvent, int] | None:
        """Records events; returns the event whose completion time has the tightest bounds, and that time.

        Returns None if the stream is behind other work.
        """
        best: tuple[int, AcceleratorEvent, int] | None = None
        for _ in range(_ATTEMPTS):
            before_ns = time.monotonic_ns()
            event = self._stream.record(timing=True)
            while not event.done():
                if time.monotonic_ns() - before_ns > _LONGEST_READING_NS:
                    return None if best is None else best[1:]
                time.sleep(0)
            width_ns = time.monotonic_ns() - before_ns
            if best is None or width_ns < best[0]:
                best = width_ns, event, before_ns + width_ns // 2
            if width_ns < _NARROW_NS:
                break
        assert best is not None
        return best[1:]


@functools.cache
def clock_of(device: torch.device) -> DeviceClock:
    """Returns the `DeviceClock` for a device."""
    return DeviceClock(device)


class DeviceWatch:
    """A thread that polls events, started by the first `add`."""

    def __init__(self) -> None:
        self._polls: dict[Callable[[], bool], torch.device] = {}
        self._lock = threading.Lock()
        self._added = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, poll: Callable[[], bool], device: torch.device) -> None:
        """Calls `poll` at intervals until it returns False.

        Args:
            poll: the function, which must not block.
            device: the events' device. It is the current device during each call of `poll`.
        """
        with self._lock:
            self._polls[poll] = device
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-device-times", daemon=True)
                self._thread.start()
        if not self._added.is_set():  # cheaper than `set`
            self._added.set()

    def _run(self) -> None:
        while True:
            self._added.wait()
            time.sleep(_POLLING_S)
            self._added.clear()  # before the entries are taken, so that none is missed
            with self._lock:
                polls, self._polls = self._polls, {}  # `add` may insert new entries in the meantime
            left: dict[Callable[[], bool], torch.device] = {}
            for device in dict.fromkeys(polls.values()):
                with contextlib.suppress(RuntimeError), polled(device):  # a device error, as in `_is_over`
                    left |= {poll: device for poll, its in polls.items() if its == device and not _is_over(poll)}
            with self._lock:
                self._polls |= left
                if self._polls:
                    self._added.set()


def _is_over(poll: Callable[[], bool]) -> bool:
    try:
        return not poll()
    except RuntimeError:  # a device error, which the program also receives
        return True


DEVICE_WATCH = DeviceWatch()


class RecordedWork:
    """A call or a message that has just been submitted.

    Args:
        nbytes: the number of bytes contributed by this rank.
        is_within: whether the contributed bytes stay within the host.
        source: the sender's group rank; -1 for a receive from any sender, and for all work other than receives.
        receives: whether the work is a receive.
    """

    def __init__(
        self, call: _core.RecordedCall, nbytes: int, is_within: bool, source: int = -1, receives: bool = False
    ) -> None:
        self._call = call
        self._nbytes = (nbytes, 0) if is_within else (0, nbytes)
        self._source = source
        self._receives = receives
        self._device: torch.device | None = None
        self._reached: AcceleratorEvent | None = None
        self._ended: AcceleratorEvent | None = None
        self._is_started = self._is_ended = False
        self._lock = threading.Lock()

    @property
    def is_recorded(self) -> bool:
        """Whether the work is being recorded. If not, callers can skip the events for `follow`."""
        return _core.is_recording()

    def start(self) -> None:
        """Records that the operation is starting."""
        self._call.start()

    def follow(self, device: torch.device, reached: AcceleratorEvent, ended: AcceleratorEvent | None = None) -> None:
        """Records a device operation with times measured by the device; call it once, instead of `start`.

        The operation starts when the device reaches it, after the program's earlier work; the start appears in the
        recording within about 20 ms.

        Args:
            reached: a timing event recorded after the program's preceding work.
            ended: a timing event recorded after the operation, or None if `end_behind` sets it later.
        """
        with self._lock:
            if not self.is_recorded or self._is_ended:
                return
            self._device, self._reached, self._ended = device, reached, ended
        DEVICE_WATCH.add(self._poll, device)

    def end_behind(self, ended: AcceleratorEvent) -> None:
        """Sets the timing event recorded after the operation, unless it was passed to `follow`."""
        with self._lock:
            self._ended = ended

    def end(self, outcome: int, /) -> None:
        """Records that the operation is complete; `outcome` is an `OutcomeCode`. Later calls have no effect."""
        with self._lock:
            self._end(outcome)

    def _end(self, outcome: int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if outcome != OutcomeCode.OK:
            self._call.end(outcome)
            return
        self._start_on_device()
        tick = 0
        if self._device is not None and self._ended is not None:
            tick = clock_of(self._device).tick_of(self._ended)
        self._call.end(outcome, *self._nbytes, self._source, tick)

    def _start_on_device(self) -> None:
        if self._device is not None and self._reached is not None and not self._is_started:
            self._is_started = True
            self._call.start(clock_of(self._device).tick_of(self._reached))

    def _poll(self) -> bool:
        """Records the device's progress; returns whether the operation is still in progress."""
        with self._lock:
            if self._is_ended or self._reached is None:
                return False
            if self._ended is not None and self._ended.done():
                self._end(OutcomeCode.OK)
            elif not self._is_started and self._reached.done():
                self._start_on_device()
            return not self._is_ended

    def end_from(self, source: int, outcome: int) -> None:
        """Records that a message is complete; for a receive, `source` is the sender's group rank."""
        if self._receives:
            self._source = source
        self.end(outcome)


class GroupRecorder:
    """Records calls and messages under the serial number `group`; records nothing while `group` is 0."""

    def __init__(self, members: Sequence[RankIdentity], rank: int) -> None:
        self.group = 0
        self._rank = rank
        self._host = [member.host == members[rank].host for member in members]
        self._is_within = all(self._host)
        self._calls = 0

    def call(self, call: CollectiveCall, is_async: bool) -> RecordedWork:
        """Records the group's next collective."""
        self._calls += 1
        fields = (call.operation, call.dtype, call.reduce_op, self._calls, call.count, call.root, is_async, -1)
        nbytes = contributed(call, self._rank)
        return RecordedWork(_core.RecordedCall(self.group, *fields), nbytes, self._is_within)

    def small_call(self, operation: int, dtype: int, reduce_op: int, count: int, nbytes: int) -> RecordedWork:
        """Records a synchronous collective without a root."""
        self._calls += 1
        recorded = _core.RecordedCall(self.group, operation, dtype, reduce_op, self._calls, count, -1, False, -1)
        return RecordedWork(recorded, nbytes, self._is_within)

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        """Records the start of a send to a group rank."""
        return self._message(SEND, peer, tag, dtype, tensor)

    def receive(self, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        """Records the start of a receive from a group rank, or from any rank if `peer` is -1."""
        return self._message(RECEIVE, peer, tag, dtype, tensor)

    def _message(self, operation: int, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        nbytes = sum(tensor[1::2])
        fields = (operation, dtype, NO_REDUCTION, 0, nbytes // ITEM_SIZES[dtype], peer, True, tag)
        recorded = _core.RecordedCall(self.group, *fields)
        recorded.start()
        if operation == RECEIVE:
            return RecordedWork(recorded, 0, True, peer, receives=True)
        return RecordedWork(recorded, nbytes, self._host[peer])


class HasRecorder:
    """Base class for channels and messages whose operations are recorded by `_recorder`."""

    _recorder: GroupRecorder

    def record_as(self, group: int, /) -> None:
        """Records later operations under the group's serial number."""
        self._recorder.group = group

    record_messages_as = record_as


def contributed(call: CollectiveCall, rank: int) -> int:
    """Returns the number of bytes that a rank contributes to a call, as defined in `native/host/group.cpp`."""
    if call.operation == Operation.BROADCAST:
        return _nbytes(call.outputs) if rank == call.root else 0
    if call.operation == Operation.REDUCE:
        return 0 if rank == call.root else _nbytes(call.outputs)
    return _nbytes(call.outputs if call.operation == Operation.ALL_REDUCE else call.inputs)


def _nbytes(tensors: Sequence[Pieces]) -> int:
    return sum(sum(pieces[1::2]) for pieces in tensors)
