"""The nccl engine where there is no GPU: CPU tensors, over the library that `native/nccl_stub` makes.

`build` compiles it; in a rank, `use` puts the engine over it in nccl's place, for CPU tensors. This module is then what
the registry imports: it has `missing_piece` and `start`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.comm.engine import registry
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.nccl import library
from paceline.comm.engine.nccl.engine import NcclEngine

GPU_VARIABLE = "STUB_NCCL_GPU"
_SOURCE = Path(__file__).parents[1] / "native" / "nccl_stub" / "nccl.cpp"
_COMPILER = os.environ.get("CXX", "c++")


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; its path."""
    path = folder / "libnccl_stub.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread"]
    subprocess.run([_COMPILER, *flags, str(_SOURCE), "-o", str(path)], check=True, timeout=100)
    return path


def use(path: Path, folder: Path, log: Path | None = None) -> None:
    """Has backend="nccl" mean the stub at `path` in this process, with its files in `folder`."""
    os.environ[library.LIBRARY_VARIABLE] = str(path)
    os.environ["STUB_NCCL_FOLDER"] = str(folder)
    if log is not None:
        os.environ["STUB_NCCL_LOG"] = str(log)
    registry._ENGINES = {**registry._ENGINES, "nccl": registry._Entry("cpu", __name__)}


@contextlib.contextmanager
def told(**settings: object) -> Iterator[None]:
    """Has the stub behave otherwise within: `told(loses="ncclSend")` sets STUB_NCCL_LOSES."""
    names = {f"STUB_NCCL_{name.upper()}": str(value) for name, value in settings.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def missing_piece() -> None:
    """Nothing."""


def start(context: EngineContext) -> NcclEngine:
    loaded = library.find()
    cuda = stand_in_for_cuda(loaded.path)
    return NcclEngine(context, loaded, lambda device: StubDevice(cuda))


def stand_in_for_cuda(path: str) -> ctypes.CDLL:
    """The stub's functions that NCCL does not have."""
    cuda = ctypes.CDLL(path)
    cuda.stubOpenStream.restype = ctypes.c_void_p
    cuda.stubMark.argtypes, cuda.stubMark.restype = (ctypes.c_void_p,), ctypes.c_int64
    cuda.stubPassed.argtypes = cuda.stubWait.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    cuda.stubCopy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return cuda


class StubDevice:
    """Stands for a GPU. What the program does with tensors is done at once, so its stream is its thread."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda

    @property
    def identity(self) -> str:
        return os.environ.get(GPU_VARIABLE, f"GPU-{os.getpid()}")

    def __str__(self) -> str:
        return "cuda:0"

    def activated(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def open_stream(self) -> StubStream:
        return StubStream(self._cuda)


class StubStream:
    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda
        self.handle: int = cuda.stubOpenStream()
        self._rooms: list[torch.Tensor] = []

    def follow(self) -> None:
        pass

    def mark(self) -> StubMark:
        return StubMark(self._cuda, self.handle, self._cuda.stubMark(self.handle))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._rooms.append(tensor)  # a CPU's allocator knows no streams
        return tensor.data_ptr(), tensor

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._cuda.stubCopy(self.handle, source, target, nbytes)


class StubMark:
    def __init__(self, cuda: ctypes.CDLL, stream: int, place: int) -> None:
        self._cuda = cuda
        self._stream = stream
        self._place = place

    def done(self) -> bool:
        return self._cuda.stubPassed(self._stream, self._place) == 1

    def order(self) -> None:
        self._cuda.stubWait(self._stream, self._place)
