"""What the option objects of torch.distributed's calls say, such as `AllreduceOptions`.

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

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_UNSET = timedelta(0)


class Options(Protocol):
    """Any of torch's option objects; those for calls without a root have no `rootRank`."""

    timeout: timedelta
    rootRank: int  # noqa: N815 (torch's name)


def are_options(argument: object) -> TypeIs[Options]:
    """Whether it is an option object, where a number or a reduction would be as good."""
    return hasattr(argument, "timeout")


def time_limit(opts: object, timeout: Timeout | None = None) -> Timeout | None:
    """How long the call may take; None for the group's limit."""
    if are_options(opts):
        timeout = opts.timeout
        return timeout if timeout is not None and timeout > _UNSET else None
    return timeout


def reduction_of(op: object) -> Reduction:
    """The reduction that is asked for: by options, by torch's `ReduceOp` or by Paceline's; SUM if by nothing.

    Raises:
        TypeError: it is none of these, or one that Paceline does not have.
    """
    op = getattr(op, "reduceOp", op)
    if op is None or are_options(op):
        return ReduceOp.SUM
    if isinstance(op, (ReduceOp, PremulSum)):
        return op
    kind = getattr(op, "op", op)
    ours = ReduceOp.__members__.get(str(getattr(kind, "name", None)))
    if ours is None or (not hasattr(type(op), "RedOpType") and not type(op).__name__ == "RedOpType"):
        raise TypeError(
            f"op must be a paceline.ReduceOp, a paceline.PremulSum or a torch.distributed.ReduceOp, "
            f"not {op!r} ({type(op).__name__})"
        )
    if ours is ReduceOp.PREMUL_SUM:
        factor: float | torch.Tensor = cast(Any, op).__getstate__()[1]
        return PremulSum(factor)
    return ours


def one_list(lists: Sequence[Tensors], call: str) -> Sequence[Tensors]:
    """The only list among those that torch's programs pass, one a device; a list of tensors stands for itself.

    Raises:
        ValueError: there are several.
    """
    if lists and isinstance(lists[0], torch.Tensor):
        return lists
    if len(lists) != 1:
        raise ValueError(
            f"{call}: there are {len(lists)} lists of tensors; a process has one device here, so pass one list"
        )
    return cast("Sequence[Tensors]", lists[0])
