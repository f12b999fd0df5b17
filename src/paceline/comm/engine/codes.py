"""The numbers by which the core knows types and reductions; those of the operations are in `comm/schedule/steps.py`.

The other half is native/reduce/reduce.hpp.

How values of several ranks become one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.comm.record.layout import DTYPES as _DTYPE_NAMES
from paceline.comm.schedule.quantised import WIRES as WIRES


class ReduceOp(IntEnum):
    """A reduction; of booleans SUM, MAX and BOR are "or", PRODUCT, MIN and BAND "and".

    AVG is the sum divided by the group's size. Sums of integers wrap around at the limits of their type; AVG of
    integers divides the wrapped sum and drops the fraction (it truncates toward zero, -7 / 2 = -3), as NCCL does.
    Booleans have no AVG.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


NO_REDUCTION = 9  # stands in a call's header for a reduction where the operation has none


DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ITEM_SIZES = [getattr(torch, name).itemsize if hasattr(torch, name) else 1 for name in _DTYPE_NAMES]


WIRE_CODES: dict[str, int] = {name: code for code, name in enumerate(WIRES, 1)}
"""The numbers in native/wire/wire.hpp of what tensors are rounded to between hosts; 0 stands for their own type."""

QUANTISED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types that the core rounds."""


def dtype_name(code: int) -> str:
    """The type's name as PyTorch spells it, without "torch."."""
    return _DTYPE_NAMES[code]


# torch has the reductions in a class within its ReduceOp, and had another name for that.
setattr(ReduceOp, "RedOpType", ReduceOp)  # noqa: B010 (an assignment would look like another reduction to mypy)
reduce_op = ReduceOp


@dataclass(frozen=True)
class PremulSum:
    """The sum of the ranks' values, each multiplied by its rank's `factor` first.

    >>> PremulSum(0.5)
    PremulSum(factor=0.5)
    """

    factor: float | torch.Tensor


Reduction = ReduceOp | PremulSum
