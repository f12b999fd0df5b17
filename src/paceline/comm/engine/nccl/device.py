"""The engine's interface to a GPU: streams, and marks on them. Tests replace it with the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """A position on a stream."""

    def done(self) -> bool:
        """Returns whether the stream has passed the mark."""

    def order(self) -> None:
        """Makes the calling thread's current stream wait for the mark; the thread does not wait."""


class DeviceStream(Protocol):
    """A stream of the engine's own, which runs concurrently with the program's."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t`, as an integer."""
        ...

    def follow(self) -> None:
        """Makes this stream wait for the work that is on the calling thread's current stream now."""

    def mark(self) -> StreamEvent:
        """Returns a mark behind all work that is on the stream now."""
        ...

    def room(self, nbytes: int) -> tuple[int, object]:
        """Returns the address of new memory for this stream, and its owner to keep until its uses are enqueued."""
        ...

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Enqueues a copy of `nbytes` bytes within the device's memory."""


class Device(Protocol):
    """A device that holds the tensors of a group's calls."""

    @property
    def identity(self) -> str:
        """A text that identifies the hardware and is the same in every process that uses it."""
        ...

    def activated(self) -> AbstractContextManager[object]:
        """Makes it the calling thread's device within."""
        ...

    def open_stream(self) -> DeviceStream:
        """Returns a new stream."""
        ...


OpenDevice = Callable[[torch.device], Device]


class CudaDevice:
    """A GPU that is used through torch."""

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

    def open_stream(self) -> DeviceStream:
        """Returns a new stream of high priority, since a rank that is late with its part delays all others."""
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

    def mark(self) -> StreamEvent:
        return _CudaMark(self._device, self._stream.record_event())

    def room(self, nbytes: int) -> tuple[int, object]:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return tensor.data_ptr(), tensor

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._stream.query()  # makes CUDA's runtime set the context of a new thread, which the driver's function needs
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
    """Loads CUDA's driver, whose copy takes addresses; torch copies only tensors."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    return driver
