"""Times at which a device reached and completed work, converted to the clock of the recording.

Two events on the device's streams enclose a call or a phase of a training step. No thread blocks on these events: one
thread in the process (`DeviceWatch`) polls them at intervals and converts the times of completed events. A
`DeviceClock` for each device relates the device's time to the host's, using events on an otherwise idle stream, which
complete immediately.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import (
    AcceleratorEvent,
    AcceleratorStream,
    activated,
    is_capturing,
    record_current,
)
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import number_of

_READING_S = 10.0  # maximum age of a reading; beyond it, float32 rounding of device times exceeds 1 us
_NARROW_NS = 100_000
_ATTEMPTS = 5
_POLLING_S = 0.02


class DeviceClock:
    """Converts the times of a device's events to the recording's ticks; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._stream = AcceleratorStream(device)
        self._origin: tuple[AcceleratorEvent, int] | None = None  # an event and its completion time in ns
        self._lock = threading.Lock()

    def tick_of(self, event: AcceleratorEvent) -> int:
        """Returns the tick at which an event completed; the event must be complete and recorded with `timing`."""
        with self._lock:
            if self._origin is None or time.monotonic_ns() - self._origin[1] > _READING_S * 1e9:
                self._origin = self._read()
            origin, monotonic_ns = self._origin
            after_s = origin.elapsed_s(event)
        return _core.record_tick_at(monotonic_ns + round(after_s * 1e9))

    def _read(self) -> tuple[AcceleratorEvent, int]:
        """Returns an event and its completion time, from the attempt with the tightest bounds."""
        best: tuple[int, AcceleratorEvent, int] | None = None
        for _ in range(_ATTEMPTS):
            before_ns = time.monotonic_ns()
            event = self._stream.record(timing=True)
            while not event.done():
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
            device: the device of the events; it is made the current device for each call.
        """
        with self._lock:
            self._polls[poll] = device
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-device-times", daemon=True)
                self._thread.start()
        self._added.set()

    def _run(self) -> None:
        while True:
            self._added.wait()
            time.sleep(_POLLING_S)
            self._added.clear()
            with self._lock:
                polls, self._polls = self._polls, {}  # `add` may insert new entries in the meantime
            for poll, device in polls.items():
                with activated(device):
                    is_over = _is_over(poll)
                if not is_over:
                    with self._lock:
                        self._polls[poll] = device
            if self._polls:
                self._added.set()


def _is_over(poll: Callable[[], bool]) -> bool:
    try:
        return not poll()
    except RuntimeError:  # a device error, which the program also receives
        return True


DEVICE_WATCH = DeviceWatch()


class DevicePhases:
    """Records the phases of training steps, such as "backward", on one device.

    A phase lasts from its mark until the next mark, in device time. Marks must be made in the order of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[AcceleratorEvent, str, int]] = deque()
        self._open = 0  # the stamp of the device's current phase
        self._lock = threading.Lock()

    def mark(self, phase: str, step: int) -> None:
        """Marks the start of a phase after the work enqueued on the current stream; "" only ends the previous phase."""
        if not _core.is_recording() or is_capturing(self._device):
            return
        with self._lock:
            self._marks.append((record_current(self._device, timing=True), phase, step))
            is_first = len(self._marks) == 1
        if is_first:
            DEVICE_WATCH.add(self._poll, self._device)

    def _poll(self) -> bool:
        """Records the marks that the device has passed; returns whether any marks remain."""
        while self._marks and self._marks[0][0].done():
            event, phase, step = self._marks[0]
            tick = clock_of(self._device).tick_of(event)
            if self._open:
                _core.record_end_at(self._open, tick)
                self._open = 0
            if phase:
                index = self._device.index or 0
                self._open = _core.record_begin_at(EventKind.DEVICE, number_of(phase), index, step, tick)
            with self._lock:
                self._marks.popleft()
        with self._lock:
            return bool(self._marks)


@functools.cache
def phases_of(device: torch.device) -> DevicePhases:
    """Returns the `DevicePhases` for a device."""
    return DevicePhases(device)
