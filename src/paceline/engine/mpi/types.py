"""Maps Paceline's types and reductions to MPI's; reductions that MPI lacks are made from those of the native core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from paceline import _core
from paceline.engine.codes import DTYPES, ITEM_SIZES, ReduceOp
from paceline.engine.mpi.library import library

_NAMES = {
    torch.bool: "C_BOOL",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PREMUL_SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_OPS_OF_BOOLEANS = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), "LOR")
_OPS_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), "LAND")
_OPS_OF_BOOLEANS[ReduceOp.BXOR] = "LXOR"


@functools.cache
def datatype(dtype: int) -> Any:
    """Returns MPI's datatype for a dtype code; if MPI has none (float16, bfloat16), one of as many bytes as an item."""
    name = _NAMES.get(DTYPES[dtype])
    if name is not None:
        return getattr(library(), name)
    return library().BYTE.Create_contiguous(ITEM_SIZES[dtype]).Commit()


@functools.cache
def reduction(dtype: int, reduce_op: int) -> Any:
    """Returns MPI's reduction for a dtype code and a reduce op; for AVG it is the sum."""
    op = ReduceOp(reduce_op)
    if DTYPES[dtype] is torch.bool:
        return getattr(library(), _OPS_OF_BOOLEANS[op])
    if DTYPES[dtype] in _NAMES:
        return getattr(library(), _OPS[op])
    by_core = ReduceOp.SUM if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else op
    return _of_core(dtype, by_core)


@functools.cache
def _of_core(dtype: int, op: ReduceOp) -> Any:
    combine: Callable[[Any, Any, Any], None] = functools.partial(_combine, dtype, op)
    return library().Op.Create(combine, commute=True)


def _combine(dtype: int, op: ReduceOp, other: Any, result: Any, _: Any) -> None:
    count = result.nbytes // ITEM_SIZES[dtype]
    _core.reduce(result.address, [other.address, result.address], count, dtype, op, 1)
