"""Codes of dtypes, reductions and wire formats that Python and the core share (native/reduce/reduce.hpp).

The codes of the operations are in `comm/schedule/steps.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.comm.record.layout import DTYPES as _DTYPE_NAMES
from paceline.comm.schedule.quantised import WIRES as WIRES


class ReduceOp(IntEnum):
    """A reduction. On booleans, SUM, MAX and BOR mean "or", and PRODUCT, MIN and BAND mean "and".

    AVG is the sum divided by the group's size. Sums of integers wrap around at the limits of their type; AVG of
    integers divides the wrapped sum and truncates toward zero (-7 / 2 = -3), like NCCL. AVG is not defined for
    booleans.
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


NO_REDUCTION = 9  # in the header of a call without a reduction


DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ITEM_SIZES = [getattr(torch, name).itemsize if hasattr(torch, name) else 1 for name in _DTYPE_NAMES]


WIRE_CODES: dict[str, int] = {name: code for code, name in enumerate(WIRES, 1)}
"""Codes for the formats to which tensors are rounded between hosts (native/wire/wire.hpp); 0 means no rounding."""

QUANTISED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that the core can round."""


def dtype_name(code: int) -> str:
    """Returns PyTorch's name for a dtype, without "torch."."""
    return _DTYPE_NAMES[code]


# Programs for torch also use the nested class RedOpType and the former name `reduce_op`.
setattr(ReduceOp, "RedOpType", ReduceOp)  # noqa: B010 (an assignment would look like another reduction to mypy)
reduce_op = ReduceOp


@dataclass(frozen=True)
class PremulSum:
    """The sum of the ranks' values, each multiplied by its rank's `factor`.

    >>> PremulSum(0.5)
    PremulSum(factor=0.5)
    """

    factor: float | torch.Tensor


Reduction = ReduceOp | PremulSum
