"""The memory of tensors, as files are written from it and read into it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def memory_with(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements, which are in one piece on the CPU; they keep the tensor alive."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor that is in one piece as bytes in the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
