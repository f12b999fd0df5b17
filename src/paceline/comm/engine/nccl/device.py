"""`Device`: the engine's interface to a GPU, with streams and marks on them. Tests replace it with the CPU."""

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
        """Makes the calling thread's current stream, but not the thread, wait for the mark."""


class DeviceStream(Protocol):
    """A stream of the engine's own, which runs concurrently with the program's."""

    @property
    def handle(self) -> int:
        """The `cudaStream_t`, as an integer."""
        ...

    def follow(self) -> None:
        """Makes this stream wait for the present work on the calling thread's current stream."""

    def mark(self) -> StreamEvent:
        """Returns a mark behind the present work on the stream."""
        ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Returns the address of new memory for this stream, and its owner to keep until its uses are enqueued."""
        ...

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Enqueues a copy of `nbytes` bytes within the device's memory."""


class Device(Protocol):
    """A device that holds the tensors of a group's calls."""

    @property
    def identity(self) -> str:
        """A text that identifies the hardware in all processes."""
        ...

    def activated(self) -> AbstractContextManager[object]:
        """Returns a context in which this is the calling thread's device."""
        ...

    def open_stream(self) -> DeviceStream:
        """Returns a new stream."""
        ...


OpenDevice = Callable[[torch.device], Device]


class CudaDevice:
    """A GPU, used through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device

    @property
    def identity(self) -> str:
        """The GPU's UUID."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def __str__(self) -> str:
        return str(self._device)

    def activated(self) -> AbstractContextManager[object]:
        """Returns a context in which this is the calling thread's device."""
        return torch.cuda.device(self._device)

    def open_stream(self) -> DeviceStream:
        """Returns a new stream of high priority, since a late rank delays all others."""
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

    def allocate(self, nbytes: int) -> tuple[int, object]:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return tensor.data_ptr(), tensor

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._stream.query()  # makes CUDA's runtime set a new thread's context, which the driver's function requires
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
    """Loads CUDA's driver, which can copy between addresses; torch copies only tensors."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    return driver
