"""Compression of tensors before reductions: none, or half precision."""

from __future__ import annotations

from typing import Protocol

import torch


class Compressor(Protocol):
    """Compresses a tensor before its reduction, and decompresses the result."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor to reduce instead of `tensor`, and the context for `decompress`."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the reduced tensor, converted to its original dtype."""


class NoneCompressor:
    """Leaves tensors unchanged."""

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
        """Converts floating-point tensors to float16; returns other tensors unchanged."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor, converted to its original dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The available compressors: `Compression.none` and `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
