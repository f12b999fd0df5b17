"""The module `torch.fake`, the counterpart of `torch.cuda` for the fake device; registered by `fake_device.load`.

Streams and events are PyTorch's generic ones. The functions `counters`, `delays`, `host_alias` and `launch` have no
counterpart in `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

ops = torch.ops.fake_device
_library: ctypes.CDLL | None = None  # the loader sets it

is_built = is_initialized = lambda: True


def init() -> None:
    """Does nothing, because the first allocation initializes the device."""


_lazy_init = init


def _index(device: Any = None) -> int:
    if device is None:
        return ops.current_device()
    if isinstance(device, int):
        return device if device >= 0 else ops.current_device()
    index = torch.device(device).index
    return ops.current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _count


_count = 2


def current_device() -> int:
    return ops.current_device()


def set_device(device: Any) -> None:
    if (index := _index(device)) >= 0:
        ops.exchange_device(index)


def get_device_name(device: Any = None) -> str:
    return f"fake device {_index(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


class device:  # noqa: N801
    """Sets the current device in a context."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = ops.exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        ops.exchange_device(self._before)


class device_of(device):  # noqa: N801
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "fake" else None)


def _is_in_bad_fork() -> bool:
    return ops.in_bad_fork()


# Streams and events


class Stream(torch.Stream):
    """One of the 32 streams in a device's pool, which are assigned round-robin."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device("fake", _index(device)), priority=priority)


class Event:
    """Creates a `torch.Event`. A subclass would not work, because `torch.Event` is only comparable to its own type."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(torch.device("fake", ops.current_device()), enable_timing=enable_timing)


def _stream(of: int, device: Any) -> Stream:
    index = _index(device)
    return Stream(stream_id=of, device_index=index, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("fake", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    return _stream(0, device)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Sets the current stream and its device in a context."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


StreamContext = stream


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(torch.device("fake", _index(device)))


def is_current_stream_capturing() -> bool:
    return False


# Random numbers


def get_rng_state(device: Any = None) -> torch.Tensor:
    return ops.rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    ops.set_rng_state(_index(device), state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(at) for at in range(_count)]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for at, state in enumerate(states):
        set_rng_state(state, at)


def manual_seed(seed: int) -> None:
    ops.manual_seed(ops.current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for at in range(_count):
        ops.manual_seed(at, seed)


def initial_seed() -> int:
    return ops.initial_seed(ops.current_device())


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("fake")


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("fake")


def is_bf16_supported() -> bool:
    return True


# Memory


def empty_cache() -> None:
    """Does nothing, so that tests can observe the reuse of cached memory."""


def memory_allocated(device: Any = None) -> int:
    return 0


max_memory_allocated = memory_reserved = memory_allocated


# Additional functions for tests


def counters() -> dict[str, int]:
    """Returns the number of operations of each kind since the process started.

    The kinds are kernels, copies, synchronizations (where the host would also wait on a GPU), allocations, events, and
    `waiting_kernels`: kernels that run asynchronously on a GPU but for which this device makes the host wait.
    """
    return dict(ops.counters())


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yields a dictionary. On exit, it receives the counts of the operations that ran in the context."""
    before = counters()
    counts: dict[str, int] = {}
    yield counts
    counts.update({name: value - before[name] for name, value in counters().items()})


@contextlib.contextmanager
def delays(seed: int, most_us: int = 2000) -> Iterator[None]:
    """Makes streams sleep before about half of their jobs, for a random time of up to `most_us` microseconds."""
    ops.set_delays(seed, most_us)
    try:
        yield
    finally:
        ops.set_delays(0, 0)


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the memory of a device tensor, for functions that `launch` runs."""
    return ops.host_alias(tensor.detach())


_launched: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _call(number: int) -> None:
    _launched.pop(number)()


def launch(function: Callable[[], object], stream: torch.Stream | None = None) -> None:
    """Runs a function in stream order on the thread of a stream, which is the current stream by default."""
    stream = current_stream() if stream is None else stream
    number = next(_numbers)
    _launched[number] = function
    assert _library is not None
    _library.fake_launch(stream.device.index, ctypes.c_int64(stream.stream_id), _call, ctypes.c_int64(number))
