"""Views CPU memory at an address as a tensor, and presents tensors in several pieces as one contiguous buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from paceline.engine.channel import Pieces


def tensor_at(address: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Returns the memory as a flat tensor, without a copy; the caller must keep the memory alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)


class FlatBuffer:
    """Presents pieces as one contiguous buffer, which is a copy unless they are contiguous already.

    `copy_in` fills the copy and `copy_out` writes it back; both do nothing if there is no copy.
    """

    def __init__(self, pieces: Iterable[Pieces]) -> None:
        self._pieces = _joined(pieces)
        self.nbytes = sum(nbytes for _, nbytes in self._pieces)
        self._copy: torch.Tensor | None = None
        if len(self._pieces) > 1:
            self._copy = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            self.address = self._copy.data_ptr()
        else:
            self.address = self._pieces[0][0] if self._pieces else 0

    def copy_in(self) -> FlatBuffer:
        """Fills the copy from the pieces and returns this buffer."""
        at = self.address
        for address, nbytes in self._pieces if self._copy is not None else ():
            ctypes.memmove(at, address, nbytes)
            at += nbytes
        return self

    def copy_out(self) -> None:
        """Writes the copy back to the pieces."""
        at = self.address
        for address, nbytes in self._pieces if self._copy is not None else ():
            ctypes.memmove(address, at, nbytes)
            at += nbytes

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns the buffer as a flat tensor of `dtype`, without a further copy."""
        if self._copy is not None:
            return self._copy.view(dtype)
        return tensor_at(self.address, self.nbytes, dtype)


def _joined(pieces: Iterable[Pieces]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for each in pieces:
        for at in range(0, len(each), 2):
            address, nbytes = each[at], each[at + 1]
            if nbytes and joined and sum(joined[-1]) == address:
                joined[-1] = joined[-1][0], joined[-1][1] + nbytes
            elif nbytes:
                joined.append((address, nbytes))
    return joined
