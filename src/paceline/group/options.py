"""Reads the option objects of torch.distributed's calls, such as `AllreduceOptions`.

They are recognised by their attributes, so that this module works with every release of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from paceline.durations import Timeout
from paceline.group.buffers import Tensors
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction
from paceline.wording import shown

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_UNSET = timedelta(0)

# torch's reductions that need no factor, by which most of its calls are recognised at once.
_TORCHS_KIND: Any = getattr(getattr(torch.distributed, "ReduceOp", None), "RedOpType", None)
_BY_TORCHS_KIND: dict[object, ReduceOp] = {
    kind: ReduceOp[name]
    for name, kind in getattr(_TORCHS_KIND, "__members__", {}).items()
    if name in ReduceOp.__members__ and name != ReduceOp.PREMUL_SUM.name
}


class Options(Protocol):
    """Any of torch's option objects; those for calls without a root have no `rootRank`."""

    timeout: timedelta
    rootRank: int  # noqa: N815 (torch's name)


def are_options(argument: object) -> TypeIs[Options]:
    """Returns whether `argument` is an option object rather than a value that could be in one."""
    return hasattr(argument, "timeout")


def time_limit(opts: object, timeout: Timeout | None = None) -> Timeout | None:
    """Returns how long the call may take, by either argument; None for the group's limit.

    Args:
        opts: an option object, or the time limit itself.
        timeout: takes precedence over `opts`.
    """
    if timeout is None:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return None if isinstance(timeout, timedelta) and timeout <= _UNSET else timeout


def reduction_of(op: object) -> Reduction:
    """Returns the reduction that options, torch's `ReduceOp` or Paceline's ask for; SUM for None.

    Raises:
        TypeError: `op` is none of these, or is a reduction that Paceline does not have.
    """
    if isinstance(op, (ReduceOp, PremulSum)):
        return op
    op = getattr(op, "reduceOp", op)
    kind = getattr(op, "op", op)
    if type(kind) is _TORCHS_KIND and kind in _BY_TORCHS_KIND:
        return _BY_TORCHS_KIND[kind]
    if op is None or are_options(op):
        return ReduceOp.SUM
    if isinstance(op, (ReduceOp, PremulSum)):
        return op
    ours = ReduceOp.__members__.get(str(getattr(kind, "name", None)))
    if ours is None or (not hasattr(type(op), "RedOpType") and not type(op).__name__ == "RedOpType"):
        raise TypeError(
            f"op must be a paceline.ReduceOp, a paceline.PremulSum or a torch.distributed.ReduceOp, "
            f"not {shown(op)} ({type(op).__name__})"
        )
    if ours is ReduceOp.PREMUL_SUM:
        factor: float | torch.Tensor = cast(Any, op).__getstate__()[1]
        return PremulSum(factor)
    return ours


def one_list(lists: Sequence[Tensors], call: str) -> Sequence[torch.Tensor]:
    """Returns the only list in `lists`; programs for torch pass one list for each device.

    A list of tensors by itself is returned as it is.

    Raises:
        ValueError: there is not exactly one list.
    """
    if lists and isinstance(lists[0], torch.Tensor):
        return cast("Sequence[torch.Tensor]", lists)
    if len(lists) != 1:
        raise ValueError(
            f"{call}: there are {len(lists)} lists of tensors; a process has one device here, so pass one list"
        )
    return cast("Sequence[torch.Tensor]", lists[0])
