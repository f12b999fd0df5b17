"""Compression of what is reduced: nothing, or half precision."""

from __future__ import annotations

from typing import Protocol

import torch


class Compressor(Protocol):
    """Makes a tensor smaller before it is reduced, and undoes that afterwards."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns what is reduced in place of `tensor`, and what `decompress` has to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns what was reduced in its original type."""


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor."""
        return tensor


class FP16Compressor:
    """Reduces floating-point tensors in float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor in float16, if it has floating-point numbers."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor in the type that it had."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The kinds of compression: `Compression.none` and `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
