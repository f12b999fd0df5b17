"""Digests of tensors, by which ranks compare what they hold without sending it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from paceline.group.buffers import memory_layout
from paceline.group.exchange import as_memory


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a digest (XXH3, 63 bits) of tensors, of their types, shapes and values."""
    total = xxhash.xxh3_64(seed=0)
    for tensor in tensors:
        total.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        total.update(memory_of(tensor))
    return total.intdigest() >> 1


def digest_of_text(text: str) -> int:
    """Returns a digest (XXH3, 63 bits) of a text."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=0) >> 1


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor, or of a contiguous copy of it in the CPU's memory, without another copy."""
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    kept = as_memory(flat)
    return kept if memory_layout(flat) == memory_layout(tensor) else memoryview(bytes(kept))
