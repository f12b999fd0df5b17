"""Streams and events for any accelerator that PyTorch supports, through the device's own module (`torch.cuda`, ...).

An engine runs a group's calls on its own `AcceleratorStream`. `follow` makes this stream wait for the program's stream,
`record` records an `AcceleratorEvent` after the work enqueued so far, and `AcceleratorEvent.order` makes the program's
stream wait for that event. None of these methods blocks the thread. On the CPU they do nothing, because work there runs
synchronously.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.001


class AcceleratorEvent:
    """A position on a stream. Thread-safe.

    Args:
        device: the stream's device, with its index.
        event: the recorded event, an object from the device's module; None on the CPU.
    """

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device = device
        self._event = event

    def done(self) -> bool:
        """Returns True if the stream has passed the position; does not disturb a graph capture on any thread."""
        if self._event is None:
            return True
        if self._device.type != "cuda":  # only CUDA graph captures can be disturbed
            return bool(self._event.query())
        with _beside_captures(self._device):
            return bool(self._event.query())

    def order(self, stream: Any = None) -> None:
        """Makes the calling thread's current stream wait for the position, without blocking the thread.

        Args:
            stream: the result of `current_stream` for the event's device, if the caller has already obtained it.
        """
        if self._event is not None:
            (current_stream(self._device) if stream is None else stream).wait_event(self._event)

    def wait(self) -> None:
        """Makes the calling thread wait until the stream has passed the position."""
        if self._event is not None:
            with activated(self._device):  # in a new thread, CUDA might otherwise create a context on the first GPU
                self._event.synchronize()

    def elapsed_s(self, later: AcceleratorEvent) -> float:
        """Returns the device time, in seconds, between two completed events recorded with `timing`; 0 on the CPU."""
        if self._event is None:
            return 0.0
        with _beside_captures(self._device):
            return float(self._event.elapsed_time(later._event)) / 1e3


class AcceleratorStream:
    """An engine's own stream, which runs concurrently with the program's streams.

    Args:
        device: the device. If it has no index, the calling thread's current device of this type is used.
        high_priority: whether this stream's work has priority on the device; useful if other ranks wait for the calls.
    """

    def __init__(self, device: torch.device, high_priority: bool = True) -> None:
        self.device = with_index(device)
        self._stream = None
        if device.type != "cpu":
            module = _module(self.device)
            with activated(self.device):
                self._stream = (
                    module.Stream(priority=-1 if high_priority else 0)
                    if hasattr(module, "Stream")
                    else torch.Stream(self.device, priority=-1 if high_priority else 0)
                )

    def follow(self, event: AcceleratorEvent | None = None) -> None:
        """Makes this stream wait for `event`, or by default for the work on the calling thread's current stream."""
        if self._stream is not None:
            if event is None:
                event = record_current(self.device)
            self._stream.wait_event(event._event)

    def record(self, timing: bool = False) -> AcceleratorEvent:
        """Records an event after this stream's enqueued work; if `timing` is set, the event can measure device time."""
        return _recorded(self.device, self._stream, timing)

    def current(self, before: Any = None) -> contextlib.AbstractContextManager[object]:
        """Makes this stream and its device current for the calling thread.

        Args:
            before: the thread's current stream on the device, if known; it becomes current again at the end.
        """
        return contextlib.nullcontext() if self._stream is None else _CurrentStream(self.device, self._stream, before)

    def synchronize(self) -> None:
        """Makes the calling thread wait for all work on this stream."""
        if self._stream is not None:
            self._stream.synchronize()


class _CurrentStream:
    """A context manager that makes a stream current. Every call uses it, and PyTorch's own would be slower."""

    def __init__(self, device: torch.device, stream: Any, before: Any = None) -> None:
        self._device = device
        self._stream = stream
        self._before = before
        self._activated: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if _module(self._device).current_device() != self._device.index:
            self._activated = activated(self._device)
            self._activated.__enter__()
        if self._before is None:
            self._before = current_stream(self._device)
        _change_stream(self._device, self._stream)

    def __exit__(self, *raised: Any) -> None:
        _change_stream(self._device, self._before)
        if self._activated is not None:
            self._activated.__exit__(*raised)


def poll_until(done: Callable[[], bool], timeout_ns: int) -> bool:
    """Polls `done`, which queries the device, until it returns True; returns False on timeout."""
    deadline_ns = time.monotonic_ns() + timeout_ns
    pause_s = _FIRST_PAUSE_S
    while not done():
        if time.monotonic_ns() > deadline_ns:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def with_index(device: torch.device) -> torch.device:
    """Returns `device` with an index; the default is the index of the calling thread's current device."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, _module(device).current_device())


@contextlib.contextmanager
def activated(device: torch.device) -> Iterator[None]:
    """Makes `device` the calling thread's current device."""
    if device.type == "cpu":
        yield
        return
    module = _module(device)
    if hasattr(module, "device"):  # `module.device`, unlike `set_device`, does not initialize the previous device
        with module.device(device):
            yield
        return
    before = module.current_device()
    module.set_device(device.index)
    try:
        yield
    finally:
        module.set_device(before)


def on_stream(device: torch.device, stream: Any) -> contextlib.AbstractContextManager[object]:
    """Sets the calling thread's current stream to `stream`, as returned by `current_stream`; None denotes the CPU."""
    return contextlib.nullcontext() if stream is None else _CurrentStream(device, stream)


def current_stream(device: torch.device) -> Any:
    """Returns the calling thread's current stream on an accelerator, as an object from the device's module."""
    module = _module(device)
    if hasattr(module, "current_stream"):
        return module.current_stream(device)
    return torch.accelerator.current_stream(device)


def current_streams(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Any]:
    """Returns the calling thread's current stream on each device of `tensors`, except the CPU."""
    return {device: current_stream(device) for device in {t.device: None for t in tensors if not t.is_cpu}}


def pooled_streams(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """Returns one stream per device from PyTorch's pool, which returns its streams in rotation."""
    return {device: AcceleratorStream(device, high_priority=False)._stream for device in devices}


@contextlib.contextmanager
def on_streams(streams: Mapping[torch.device, Any]) -> Iterator[None]:
    """Makes these streams current on their devices for the calling thread; the current device does not change."""
    before = {device: current_stream(device) for device in streams}
    try:
        for device, stream in streams.items():
            _set_stream(device, stream)
        yield
    finally:
        for device, stream in before.items():
            _set_stream(device, stream)


def _set_stream(device: torch.device, stream: Any) -> None:
    with activated(device):
        _change_stream(device, stream)


def _change_stream(device: torch.device, stream: Any) -> None:
    """Makes a stream the current stream of the current device."""
    module = _module(device)
    (module.set_stream if hasattr(module, "set_stream") else torch.accelerator.set_stream)(stream)


def current_accelerator() -> torch.device | None:
    """Returns the type of accelerator that PyTorch uses on this machine, or None.

    Some builds return a type although no such device is present.
    """
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises this error instead of returning None
        return None


def accelerator_in_use() -> torch.device | None:
    """Returns the type of the accelerator that this process has used, or None; does not initialize the device."""
    accelerator = current_accelerator()
    if accelerator is None:
        return None
    module = _module(accelerator)
    is_initialized = getattr(module, "is_initialized", None)
    return accelerator if (module.is_available() if is_initialized is None else is_initialized()) else None


def record_current(device: torch.device, timing: bool = False, current: Any = None) -> AcceleratorEvent:
    """Records an event after the work enqueued so far on the calling thread's current stream.

    Args:
        device: the stream's device.
        timing: whether the event measures the device's time.
        current: the result of `current_stream(device)`, if the caller has already obtained it.
    """
    if device.type == "cpu":
        return AcceleratorEvent(device, None)
    return _recorded(device, current_stream(device) if current is None else current, timing)


def is_capturing(device: torch.device) -> bool:
    """Returns True if the calling thread's current stream on the device is being captured into a graph."""
    if device.type == "cpu":
        return False
    module = _module(device)
    captures = getattr(module, "is_current_stream_capturing", None)
    if captures is None:
        return False
    if device.index is None or module.current_device() == device.index:
        return bool(captures())
    with activated(device):
        return bool(captures())


@contextlib.contextmanager
def polled(device: torch.device) -> Iterator[None]:
    """Makes `device` current for a thread that only polls events; such a thread never disturbs a graph capture.

    Unless a thread sets its device, CUDA creates a context on the first GPU when the thread queries an event.
    """
    with activated(device):
        exchange = _exchange_capture_mode() if device.type == "cuda" else None
        if exchange is not None and not getattr(_thread, "is_beside_captures", False):
            exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
            _thread.is_beside_captures = True
        yield


_thread = threading.local()


@contextlib.contextmanager
def _beside_captures(device: torch.device) -> Iterator[None]:
    """Allows the calling thread to query events during a graph capture without invalidating the capture."""
    is_beside = device.type != "cuda" or getattr(_thread, "is_beside_captures", False)
    exchange = None if is_beside else _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, which has the same value in HIP


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """Returns the driver function that exchanges the thread's capture mode, or None if the driver lacks it."""
    prefix, names = ("hip", _loaded("libamdhip64.so")) if torch.version.hip else ("cu", ["libcuda.so.1", "libcuda.so"])
    for name in names:
        with contextlib.suppress(OSError, AttributeError):
            function: Callable[[Any], int] = getattr(ctypes.CDLL(name), f"{prefix}ThreadExchangeStreamCaptureMode")
            return function
    return None


def _loaded(library: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Returns the paths of a library that this process has loaded.

    Loading it by its name could load a second copy: the name of ROCm's library includes a version, and PyTorch's
    wheels contain a copy of their own.
    """
    with contextlib.suppress(OSError):
        lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
        paths = dict.fromkeys(line[5] for line in lines if len(line) == 6)
        return [path for path in paths if path.startswith("/") and path.rpartition("/")[2].startswith(library)]
    return []


def memory_at(address: int, nbytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Returns a flat tensor that shares `nbytes` bytes of memory on any device; the caller keeps the memory alive."""
    flat = torch.empty(0, dtype=dtype, device=device)
    if nbytes:
        storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        flat.set_(storage, 0, (nbytes // dtype.itemsize,))  # type: ignore[call-overload]
    return flat


def copy_pieces(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to the target of the same size on the device's current stream, using few kernels."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


def _recorded(device: torch.device, stream: Any, timing: bool) -> AcceleratorEvent:
    if stream is None:
        return AcceleratorEvent(device, None)
    module = _module(device)
    event = (
        module.Event(enable_timing=timing) if hasattr(module, "Event") else torch.Event(device, enable_timing=timing)
    )
    event.record(stream)
    return AcceleratorEvent(device, event)


def _module(device: torch.device) -> Any:
    return _module_of(device.type)


@functools.cache  # every call on a device needs the module several times, and PyTorch's own lookup takes a microsecond
def _module_of(device_type: str) -> Any:
    return cast(Any, torch.get_device_module(device_type))
