"""Maps Paceline's types and reductions to NCCL's.

Data that is only moved is passed as bytes. A type that NCCL lacks is reduced as another one where that gives the same
result: booleans as bytes of 0 and 1, complex numbers as pairs of floats.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from paceline.engine.codes import ReduceOp, dtype_name

FLOAT8_SINCE = 22400


class DataType(IntEnum):
    """The values of `ncclDataType_t`."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11


class RedOp(IntEnum):
    """The values of `ncclRedOp_t`."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class Reduction(NamedTuple):
    """A reduction as NCCL sees it: elements of `data_type`, of `item_size` bytes each, are reduced by `op`."""

    data_type: DataType
    item_size: int
    op: RedOp


_INTEGERS = {
    "uint8": (DataType.UINT8, 1),
    "int8": (DataType.INT8, 1),
    "int32": (DataType.INT32, 4),
    "uint32": (DataType.UINT32, 4),
    "int64": (DataType.INT64, 8),
    "uint64": (DataType.UINT64, 8),
}
_FLOATS = {
    "float16": (DataType.FLOAT16, 2),
    "bfloat16": (DataType.BFLOAT16, 2),
    "float32": (DataType.FLOAT32, 4),
    "float64": (DataType.FLOAT64, 8),
}
_PAIRS = {
    "complex32": (DataType.FLOAT16, 2),
    "complex64": (DataType.FLOAT32, 4),
    "complex128": (DataType.FLOAT64, 8),
}
_FLOAT8 = {"float8_e4m3fn": (DataType.FLOAT8_E4M3, 1), "float8_e5m2": (DataType.FLOAT8_E5M2, 1)}

_OF_NUMBERS = {
    ReduceOp.SUM: RedOp.SUM,
    ReduceOp.PRODUCT: RedOp.PROD,
    ReduceOp.MIN: RedOp.MIN,
    ReduceOp.MAX: RedOp.MAX,
    ReduceOp.PREMUL_SUM: RedOp.SUM,  # the tensors have been multiplied already
    ReduceOp.AVG: RedOp.AVG,
}
_OF_PAIRS = {code: _OF_NUMBERS[code] for code in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)}
_OF_BOOLEANS = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), RedOp.MAX)
_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), RedOp.MIN)


def reduction(dtype: int, reduce_op: int, version: int) -> Reduction | None:
    """Returns how NCCL of `version` performs a reduction, or None if it cannot."""
    name, code = dtype_name(dtype), ReduceOp(reduce_op)
    if name == "bool":
        known, ops = (DataType.UINT8, 1), _OF_BOOLEANS
    elif name in _PAIRS:
        known, ops = _PAIRS[name], _OF_PAIRS
    elif name in _INTEGERS:
        known, ops = _INTEGERS[name], _OF_NUMBERS
    elif name in _FLOATS or (name in _FLOAT8 and version >= FLOAT8_SINCE):
        known, ops = (_FLOATS | _FLOAT8)[name], _OF_NUMBERS
    else:
        return None
    op = ops.get(code)
    return None if op is None else Reduction(*known, op)
