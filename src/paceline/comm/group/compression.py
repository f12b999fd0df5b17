"""Number formats that reduce the size of floats sent between hosts, and error feedback for the rounding (`Wire`)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from paceline.comm.engine.channel import DTYPES, NO_REDUCTION, QUANTIZED_TYPES, WIRE_CODES, CollectiveCall, ReduceOp
from paceline.comm.group.call_plan import CallPlan
from paceline.comm.schedule.steps import Operation

WireKind = Literal["bf16", "int8", "int4"]

_SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, NO_REDUCTION)
_OF_ALL_RANKS = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)  # the longest buffer has one part per rank


class Wire:
    """Rounds a repeatedly reduced tensor for transfer between hosts, and compensates for the rounding in later calls.

    The rounding error that a call makes on this rank is stored and added in the next call (error feedback). The errors
    therefore do not accumulate: the sum of all results differs from the exact sum by at most the rounding error of one
    call. Use a separate object for each tensor or list of tensors. A plain `wire="int8"` does not store errors.

    The residuals take up to 4 bytes per element on each rank. A call with a different number of elements discards the
    residuals.

    Args:
        kind: the format: "bf16", "int8" or "int4"; see docs/slow-networks.md.

    Attributes:
        kind: the format.
        residual: the error to add in the next call, a float32 tensor, or None before the first call. It differs between
            ranks and should be saved in checkpoints.

    Raises:
        ValueError: there is no such format.

    >>> Wire("int8")
    Wire('int8')
    """

    def __init__(self, kind: WireKind) -> None:
        self.kind = checked_kind(kind)
        self.residual: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"Wire({self.kind!r})"

    def reset(self) -> None:
        """Discards the residual."""
        self.residual = None

    def residual_of(self, count: int) -> torch.Tensor:
        """Returns the residuals for a call on `count` elements: zeros if the number of elements has changed."""
        held = self.residual
        if held is None or held.numel() != count or held.dtype is not torch.float32 or not held.is_contiguous():
            held = self.residual = torch.zeros(count, dtype=torch.float32, device="cpu")
        return held


WireLike = WireKind | Wire | None
"""Type of the argument `wire`. None selects the group's own `wire`; most groups have none and are exact."""


def checked_kind(kind: object) -> WireKind:
    """Returns `kind` if it is a format."""
    for known in get_args(WireKind):
        if kind == known:
            return known  # type: ignore[no-any-return]  # `known` is a member of the Literal
    raise ValueError(f"wire is {kind!r}; it must be one of {', '.join(WIRE_CODES)}, a paceline.Wire, or None")


def is_quantizable(call: CollectiveCall) -> bool:
    """Returns True if the call moves or sums floats of a dtype that the core can round."""
    return DTYPES.get(call.dtype) in QUANTIZED_TYPES and call.reduce_op in _SUMS


def with_wire(plan: CallPlan, wire: WireLike, ranks: int) -> CallPlan:
    """Returns the plan for an all_reduce, a reduce_scatter or an all_gather, modified to round data to `wire`.

    `ranks` is the number of ranks in the group. If `wire` is None, the plan is returned unchanged.
    """
    if wire is None:
        return plan
    call, buffers = plan
    kind = wire.kind if isinstance(wire, Wire) else checked_kind(wire)
    if call.operation is not Operation.ALL_REDUCE and call.operation not in _OF_ALL_RANKS:
        raise ValueError(
            f"{buffers.note or call.operation}: wire={kind!r} was given, but only tensors of one size are rounded. "
            "Leave wire out, or pad the tensors to one size"
        )
    if not is_quantizable(call):
        reduction = "" if call.reduce_op == NO_REDUCTION else f" with {ReduceOp(call.reduce_op).name}"
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTIZED_TYPES)
        raise TypeError(
            f"{call.operation}: wire={kind!r} was given for {DTYPES[call.dtype]}{reduction}; only sums, averages and "
            f"all_gathers of {types} are rounded. Leave wire out, or convert the tensor"
        )
    call = call._replace(wire=WIRE_CODES[kind])
    if isinstance(wire, Wire):
        residual = wire.residual_of(call.count * (ranks if call.operation in _OF_ALL_RANKS else 1))
        buffers.residual = residual
        call = call._replace(residual=[residual.data_ptr(), residual.nbytes])
    return call, buffers
