"""How values of several ranks become one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.engine.codes import ReduceCode


class ReduceOp(IntEnum):
    """A reduction; of booleans SUM, MAX and BOR are "or", PRODUCT, MIN and BAND "and".

    AVG is the sum divided by the group's size. Sums of integers wrap around at the limits of their type; AVG of
    integers divides the wrapped sum and drops the fraction (it truncates toward zero, -7 / 2 = -3), as NCCL does.
    Booleans have no AVG.
    """

    SUM = ReduceCode.SUM
    AVG = ReduceCode.AVG
    PRODUCT = ReduceCode.PRODUCT
    MIN = ReduceCode.MIN
    MAX = ReduceCode.MAX
    BAND = ReduceCode.BAND
    BOR = ReduceCode.BOR
    BXOR = ReduceCode.BXOR
    PREMUL_SUM = ReduceCode.PREMUL_SUM


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
