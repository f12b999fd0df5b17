"""How values of several ranks become one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.engine.codes import ReduceCode


class ReduceOp(IntEnum):
    """A reduction; of booleans SUM, MAX and BOR are "or", PRODUCT, MIN and BAND "and".

    AVG is the sum divided by the group's size and is for floating and complex types.
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


@dataclass(frozen=True)
class PremulSum:
    """The sum of the ranks' values, each multiplied by its rank's `factor` first.

    >>> PremulSum(0.5)
    PremulSum(factor=0.5)
    """

    factor: float | torch.Tensor


Reduction = ReduceOp | PremulSum
