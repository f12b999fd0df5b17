"""Defines a case, and the tensors that cases use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Case = Callable[[Any, int, int], object]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def tensor(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


def sparse(rank: int, values: int = 3, *, coalesced: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    indices = (torch.arange(values) * (rank + 1) + (0 if coalesced else 1)) % 5
    made = torch.sparse_coo_tensor(indices[None], tensor(rank, values, 2, dtype=dtype), (5, 2), check_invariants=False)
    return made.coalesce() if coalesced else made


def plain(result: torch.Tensor) -> list[object]:
    """Converts a sparse tensor to tensors that can be compared."""
    return [result.is_coalesced(), result.layout, result.coalesce().indices(), result.coalesce().values()]
