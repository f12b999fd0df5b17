"""Inputs for the collectives, the same in every run, and the required results."""

from __future__ import annotations

import functools

import torch

from paceline import ReduceOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
# Sizes for inline data, one part and many parts, including odd numbers.
COUNTS = [0, 1, 7, 1000, 70_001]


def make(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    return _made(dtype, count, rank).clone()


# cached, because every reduction uses the same ones, and generating random numbers takes longer than the calls
@functools.lru_cache(256)
def _made(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, device="cpu").bool()
    if dtype in INTEGERS:
        return torch.randint(0, 7, (count,), generator=generator, device="cpu").to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def tree(values: list[torch.Tensor], combine) -> torch.Tensor:
    """Returns the sum in the documented order: a pairwise tree over ranks."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return combine(tree(values[:half], combine), tree(values[half:], combine))


def expected(op: ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    dtype = values[0].dtype
    wide = [v.float() if dtype in (torch.float16, torch.bfloat16) else v for v in values]
    if dtype is torch.bool:
        logical = {ReduceOp.SUM: torch.logical_or, ReduceOp.MAX: torch.logical_or, ReduceOp.BOR: torch.logical_or}
        logical |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), torch.logical_and)
        return tree(values, logical.get(op, torch.logical_xor))
    combine = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    total = tree(wide, combine)
    if op is ReduceOp.AVG:
        rounding = None if dtype in (*FLOATS, *COMPLEX) else "trunc"
        total = torch.div(total, len(values), rounding_mode=rounding)
    return total.to(dtype)


def supported(dtype: torch.dtype) -> list[ReduceOp]:
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT]
    bits = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    order = [ReduceOp.MIN, ReduceOp.MAX]
    if dtype in FLOATS:
        return [*arithmetic, ReduceOp.AVG, *order]
    if dtype in COMPLEX:
        return [*arithmetic, ReduceOp.AVG]
    if dtype is torch.bool:
        return [*arithmetic, *order, *bits]
    return [*arithmetic, ReduceOp.AVG, *order, *bits]
