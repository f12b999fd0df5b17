"""How values of several ranks become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.engine.codes import ReduceOp as ReduceOp

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
