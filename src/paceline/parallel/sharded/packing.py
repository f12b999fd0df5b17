"""Many tensors as one flat one for each type, to be added up together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Values = dict[torch.dtype, torch.Tensor]


def pack(tensors: Sequence[torch.Tensor], multiple: int) -> Values:
    """The tensors of each type one behind the other, with zeros up to a length that `multiple` divides."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    for dtype, parts in flat.items():
        parts.append(torch.zeros(-sum(part.numel() for part in parts) % multiple, dtype=dtype))
    return {dtype: torch.cat(parts) for dtype, parts in flat.items()}


def unpack(values: Values, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `values` with the shapes and types of the tensors that were packed."""
    taken = dict.fromkeys(values, 0)
    views = []
    for tensor in like:
        first = taken[tensor.dtype]
        taken[tensor.dtype] += tensor.numel()
        views.append(values[tensor.dtype][first : first + tensor.numel()].view(tensor.shape))
    return views


def add(left: Values, right: Values) -> Values:
    """Their sum, in the memory of `left`."""
    for dtype, flat in left.items():
        flat.add_(right[dtype])
    return left
