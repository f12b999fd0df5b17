"""Horovod's names of reductions, and what they are here."""

from __future__ import annotations

from paceline.group.reduce_op import ReduceOp

Average = ReduceOp.AVG
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = "Adasum"  # has a name only, so that scripts that offer it as an option run without it

Op = ReduceOp | str


def reduction(op: Op | None, average: bool | None = None) -> ReduceOp:
    """Returns the reduction that a call asks for, by `op` or by Horovod's older argument `average`.

    Raises:
        ValueError: both are given.
        NotImplementedError: `op` is Adasum.
    """
    if average is not None:
        if op is not None:
            raise ValueError("allreduce got both op and average, which is the older form of op; give it op only")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise NotImplementedError(
            f"the reduction {op} is not available in paceline.horovod: Adasum adds gradients pairwise with weights "
            "that depend on their angle, which Paceline's engines do not compute; use op=Average, with a learning rate "
            "that fits the number of ranks"
        )
    return op
