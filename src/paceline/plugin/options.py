"""What the arguments of torch.distributed's calls say: option objects, or the values that would be in one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

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
    """The reduction that is asked for, by an option object or by itself; without either SUM.

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


def root_rank(opts: Any) -> int:
    """The root's rank in the group, by an option object or by itself; without either 0, as in torch's options."""
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def asynchronous(opts: Any) -> bool:
    """Whether the caller does not want to wait; releases of torch that cannot say so wait by themselves."""
    return getattr(opts, "asyncOp", True)


def time_limit(opts: Any, timeout: timedelta | None) -> timedelta | None:
    """How long the call may take, by either argument; None for the group's limit."""
    if timeout is None:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > _UNSET else None


def one_list(lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The only list among those that torch passes, one a device; or the list of tensors that is passed by itself.

    Raises:
        ValueError: there is not one.
    """
    if lists and isinstance(lists[0], torch.Tensor):
        return cast("Sequence[torch.Tensor]", lists)
    if len(lists) != 1:
        raise ValueError(f"the backend 'paceline' takes one list of tensors a process, one device; got {len(lists)}")
    return cast("Sequence[torch.Tensor]", lists[0])
