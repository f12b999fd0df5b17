"""Memory for tensors in a file, of which the system keeps in memory what it has room for."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from math import prod

import torch

_CHUNK_NBYTES = 16 << 20  # that small tensors share
_ALIGNMENT_NBYTES = 64


class FileMemory:
    """Tensors that lie in a file, which has no name, so that nothing is left behind however the process ends.

    The disk's space is reserved before it is used: a write to memory could not report that the disk is full.

    Args:
        directory: where the file is made.
        me: this rank, for messages.

    Raises:
        OSError: a file cannot be made there.
    """

    def __init__(self, directory: str | os.PathLike[str], me: str) -> None:
        self._directory, self._me = os.fspath(directory), me
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="paceline-optimizer-")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno,
                f"{me}: offload: no file can be made in {self._directory}: {error.strerror}; give a directory on a "
                "local disk that this process may write to",
            ) from error
        weakref.finalize(self, self._file.close)
        self._nbytes = 0
        self._mappings: list[tuple[int, int]] = []  # the addresses at which they begin and end
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")  # the rest of the last one

    @property
    def nbytes(self) -> int:
        """How large the file is."""
        return self._nbytes

    def zeros(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of zeros in the file, whose elements fill its memory.

        Raises:
            OSError: the disk has no room.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        room = -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        if self._chunk.numel() < room:
            self._chunk = self._mapped(max(room, _CHUNK_NBYTES))
        memory, self._chunk = self._chunk[:nbytes], self._chunk[room:]
        return memory.view(dtype).as_strided(shape, strides)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in the file."""
        address = tensor.data_ptr()
        return tensor.is_cpu and any(start <= address < stop for start, stop in self._mappings)

    def _mapped(self, nbytes: int) -> torch.Tensor:
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._nbytes, length)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._me}: offload: the optimizer needs {length / 1e6:.0f} MB more in {self._directory}, besides "
                f"{self._nbytes / 1e6:.0f} MB that it has: {error.strerror}; make room, or give another directory",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), length, mmap.MAP_SHARED, offset=self._nbytes)
        self._nbytes += length
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._mappings.append((memory.data_ptr(), memory.data_ptr() + length))
        return memory
