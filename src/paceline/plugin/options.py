"""What the option objects of torch.distributed's calls say."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction

_KINDS: Any = torch_dist.ReduceOp.RedOpType  # torch's stubs do not list its members
_REDUCTIONS = {
    _KINDS.SUM: ReduceOp.SUM,
    _KINDS.AVG: ReduceOp.AVG,
    _KINDS.PRODUCT: ReduceOp.PRODUCT,
    _KINDS.MIN: ReduceOp.MIN,
    _KINDS.MAX: ReduceOp.MAX,
    _KINDS.BAND: ReduceOp.BAND,
    _KINDS.BOR: ReduceOp.BOR,
    _KINDS.BXOR: ReduceOp.BXOR,
}
_UNSET = timedelta(0)


def reduction(opts: Any) -> Reduction:
    """The reduction that is asked for, by options or by its name; without either SUM.

    Raises:
        ValueError: Paceline does not have it.
    """
    if opts is None:
        return ReduceOp.SUM
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    ours = _REDUCTIONS.get(kind)
    if ours is not None:
        return ours
    if kind == _KINDS.PREMUL_SUM:
        return PremulSum(op.__getstate__()[1])
    raise ValueError(f"the backend 'paceline' does not know the reduction {kind}")


def asynchronous(opts: Any) -> bool:
    """Whether the caller does not want to wait; releases of torch that cannot say so wait by themselves."""
    return getattr(opts, "asyncOp", True)


def time_limit(opts: Any) -> timedelta | None:
    """How long the call may take; None for the group's limit."""
    timeout: timedelta | None = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > _UNSET else None


def one_list(lists: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """The only list among those that torch passes, one a device.

    Raises:
        ValueError: there is not one.
    """
    if len(lists) != 1:
        raise ValueError(f"the backend 'paceline' takes one list of tensors a process, one device; got {len(lists)}")
    return lists[0]
