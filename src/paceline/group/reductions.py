"""Checks that a reduction is defined for a call's tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.engine.codes import DTYPE_CODES
from paceline.group.buffers import Buffers, dtype_code
from paceline.group.options import reduction_of
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction

_PREMUL_SUM = ReduceOp.PREMUL_SUM


@functools.cache
def reduces(dtype: int, reduce_op: int) -> bool:
    """Returns whether the core reduces elements of the type with the code `dtype` on the CPU."""
    return _core.reduces(dtype, reduce_op)


# For each type that is not complex: its code, and by reduction the reduction's code, or -1 where the core does not
# reduce the tensors as they are. The numbers are plain ones, since members of an enum are slow to hash and to convert.
QUICK_CODES: dict[torch.dtype, tuple[int, list[int]]] = {
    dtype: (code, [int(op) if op is not _PREMUL_SUM and _core.reduces(code, op) else -1 for op in ReduceOp])
    for dtype, code in DTYPE_CODES.items()
    if not dtype.is_complex
}


def checked_reduction(
    tensors: Sequence[torch.Tensor], op: Reduction, call: str, any_order: bool = False
) -> tuple[int, int, Buffers]:
    """Returns the codes of the tensors' type and of the reduction, and empty buffers that scale as `op` says.

    Raises:
        TypeError: the reduction is not defined for the tensors.
    """
    code = dtype_code(tensors, call)
    op = reduction_of(op)
    scale = op.factor if isinstance(op, PremulSum) else None
    reduce_code = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    if op is ReduceOp.PREMUL_SUM:
        raise TypeError(f"{call}: PREMUL_SUM needs a factor; pass paceline.PremulSum(factor)")
    # Engines for other devices than the CPU say for themselves what they do not reduce.
    if not reduces(code, reduce_code) and all(tensor.is_cpu for tensor in tensors):
        dtype = tensors[0].dtype if tensors else torch.uint8
        raise TypeError(f"{call}: {reduce_code.name} is not defined for {dtype}; convert the tensor first")
    return code, reduce_code, Buffers(scale, any_order)
