"""A GPU as the engine uses it: streams and marks in them. The tests put the CPU in its place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it."""

    def order(self) -> None:
        """Has the calling thread's current stream wait for it; the thread goes on."""


class Stream(Protocol):
    """A stream of the engine's own, which runs beside that of the program."""

    @property
    def handle(self) -> int:
        """`cudaStream_t`."""
        ...

    def follow(self) -> None:
        """Goes on only after what the calling thread's current stream has been given."""

    def mark(self) -> Mark:
        """After what the stream has been given so far."""
        ...

    def room(self, nbytes: int) -> tuple[int, object]:
        """New memory, for this stream alone: its address, and who owns it until the stream has been given its use."""
        ...

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copies memory of the device when the stream comes to it."""


class Device(Protocol):
    """A device that holds the tensors of a group's calls."""

    @property
    def identity(self) -> str:
        """Of the hardware, the same in every process that uses it."""
        ...

    def activated(self) -> AbstractContextManager[object]:
        """Makes it the calling thread's device within."""
        ...

    def open_stream(self) -> Stream:
        """A new stream."""
        ...


OpenDevice = Callable[[torch.device], Device]


class CudaDevice:
    """A GPU, as torch sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device

    @property
    def identity(self) -> str:
        """The GPU's UUID."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def __str__(self) -> str:
        return str(self._device)

    def activated(self) -> AbstractContextManager[object]:
        """Makes it the calling thread's device within."""
        return torch.cuda.device(self._device)

    def open_stream(self) -> Stream:
        """A new stream, of high priority: a rank that is late with its part holds up all others."""
        return _CudaStream(self._device)


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        return _CudaMark(self._device, self._stream.record_event())

    def room(self, nbytes: int) -> tuple[int, object]:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return tensor.data_ptr(), tensor

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._stream.query()  # has CUDA's runtime give a new thread the context that its driver wants
        result = _driver().cuMemcpyDtoDAsync_v2(target, source, nbytes, self._stream.cuda_stream)
        if result:
            raise RuntimeError(f"CUDA's driver did not copy {nbytes} bytes on {self._device}: error {result}")


class _CudaMark:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


@functools.cache
def _driver() -> ctypes.CDLL:
    """CUDA's driver: torch copies tensors, and here there are addresses."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    return driver
