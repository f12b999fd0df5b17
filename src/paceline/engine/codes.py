"""The numbers by which the core knows operations, types and reductions.

The other halves are native/host/layout.hpp and native/reduce/reduce.hpp.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Operation(IntEnum):
    """A collective."""

    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9


class ReduceCode(IntEnum):
    """A reduction."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8
    NONE = 9


_DTYPE_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ITEM_SIZES = [getattr(torch, name).itemsize if hasattr(torch, name) else 1 for name in _DTYPE_NAMES]


def dtype_name(code: int) -> str:
    """The type's name as PyTorch spells it, without "torch."."""
    return _DTYPE_NAMES[code]
