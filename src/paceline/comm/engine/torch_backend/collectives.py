"""Translation of each collective call into a single PyTorch process-group operation on flat tensors.

The choice of operation depends only on properties that are the same on all ranks, never on the addresses of a rank's
tensors. Pieces that are not adjacent in memory are copied to a flat buffer. Data that is moved but not reduced is
passed as bytes. A dtype that the process group does not support is reduced as another dtype that yields the same
result: booleans as bytes of 0 and 1, complex numbers as pairs of floats, unsigned sums as signed sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.adapters.device_streams import copy_pieces, memory_at
from paceline.comm.engine.adapters.schedule_executor import FlatBuffer, adjacent_spans
from paceline.comm.engine.channel import DTYPES, CollectiveCall, DevicePieces, Pieces, ReduceOp
from paceline.comm.schedule.steps import Operation

TorchGroup: TypeAlias = Any
"""A `torch.distributed.distributed_c10d.Backend`, whose operations are missing from PyTorch's type stubs."""

TorchWork: TypeAlias = Any
"""A `torch.distributed.Work`."""


class DeviceBuffer:
    """A `schedule_executor.FlatBuffer` on a device, with copies on the current stream."""

    def __init__(self, pieces: Iterable[Pieces], device: torch.device) -> None:
        pieces = list(pieces)
        self._is_copy = False
        if len(pieces) == 1 and isinstance(pieces[0], DevicePieces) and len(pieces[0].tensors) == 1:
            tensor = pieces[0].tensors[0]
            self._flat = tensor if tensor.dim() == 1 else tensor.as_strided((tensor.numel(),), (1,))
            return
        spans = adjacent_spans(pieces)
        self._pieces = [memory_at(address, nbytes, device) for address, nbytes in spans]
        self._is_copy = len(spans) > 1
        if self._is_copy:
            self._flat = torch.empty(sum(nbytes for _, nbytes in spans), dtype=torch.uint8, device=device)
        else:
            self._flat = self._pieces[0] if spans else torch.empty(0, dtype=torch.uint8, device=device)

    def copy_in(self) -> DeviceBuffer:
        """Fills the copy, if there is one, and returns this buffer."""
        if self._is_copy:
            copy_pieces(self._parts(), self._pieces)
        return self

    def copy_out(self) -> None:
        """Writes the copy, if there is one, back to the pieces."""
        if self._is_copy:
            copy_pieces(self._pieces, self._parts())

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns the flat tensor, viewed as `dtype`."""
        return self._flat if self._flat.dtype is dtype else self._flat.view(dtype)

    def _parts(self) -> list[torch.Tensor]:
        return list(self._flat.split([piece.numel() for piece in self._pieces]))


FlatTensor: TypeAlias = FlatBuffer | DeviceBuffer
"""The pieces of a tensor as one flat tensor, which is a copy unless the pieces are adjacent."""


class TorchReduction(NamedTuple):
    """A reduction in the form that a process group supports: `op` on elements of `dtype`."""

    dtype: torch.dtype
    op: c10d.ReduceOp.RedOpType


_Ops: TypeAlias = Mapping[ReduceOp, c10d.ReduceOp.RedOpType]

_OPS: _Ops = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVG: c10d.ReduceOp.AVG,
    ReduceOp.PREMUL_SUM: c10d.ReduceOp.SUM,  # the factor has already been applied
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
}
_SUMS: _Ops = {op: _OPS[op] for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)}
_WRAPPING = {op: _OPS[op] for op in (ReduceOp.SUM, ReduceOp.PRODUCT)}  # the same for signed and unsigned integers
_OF_BOOLEANS = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), c10d.ReduceOp.MAX)
_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), c10d.ReduceOp.MIN)

_REDUCED: Mapping[str, tuple[torch.dtype, _Ops]] = {
    **{
        name: (getattr(torch, name), _OPS)
        for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    },
    "uint32": (torch.int32, _WRAPPING),
    "uint64": (torch.int64, _WRAPPING),
    "complex32": (torch.float16, _SUMS),
    "complex64": (torch.float32, _SUMS),
    "complex128": (torch.float64, _SUMS),
    "bool": (torch.uint8, _OF_BOOLEANS),
}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def find_reduction(dtype: int, reduce_op: int, has_float8: bool = False) -> TorchReduction | None:
    """Returns the reduction in the form that an accelerator's process group supports, or None if there is none.

    Args:
        dtype, reduce_op: the codes for the dtype and the reduction.
        has_float8: whether the library and the device can reduce 8-bit floats.
    """
    kind = DTYPES[dtype]
    name = str(kind).removeprefix("torch.")
    view, ops = (kind, _OPS) if name in _FLOAT8 and has_float8 else _REDUCED.get(name, (kind, {}))
    op = ops.get(ReduceOp(reduce_op))
    return None if op is None else TorchReduction(view, op)


@dataclass(frozen=True)
class CallSettings:
    """Settings for a call that are not part of `CollectiveCall`.

    Attributes:
        rank: the group rank of this process.
        device: the device of the tensors, with its index.
        timeout: the timeout to pass to the process group; None selects the group's own timeout.
        reduction: the reduction, if the call reduces.
    """

    rank: int
    device: torch.device
    timeout: timedelta | None = None
    reduction: TorchReduction | None = None

    def buffer(self, pieces: Iterable[Pieces]) -> FlatTensor:
        """Returns the pieces as one flat tensor."""
        return FlatBuffer(pieces) if self.device.type == "cpu" else DeviceBuffer(pieces, self.device)


class StartedCall(NamedTuple):
    """A call that a process group has started.

    Attributes:
        work: the process group's work; None if the call required no communication, or runs on the current stream.
        written: the outputs that were replaced by copies, which must be written back when the work completes.
    """

    work: TorchWork | None
    written: Sequence[FlatTensor] = ()


def start_call(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    """Starts a call other than a barrier; on a device, the copies that precede it run on the current stream."""
    return _CALLS[call.operation](group, call, settings)


def start_barrier(group: TorchGroup, timeout: timedelta) -> TorchWork:
    """Starts a barrier in a process group for CPU tensors."""
    options = c10d.BarrierOptions()
    options.timeout = timeout
    return group.barrier(options)


def _configured(options: Any, call: CollectiveCall, settings: CallSettings) -> Any:
    if settings.timeout is not None:
        options.timeout = settings.timeout
    # Since release 2.8, PyTorch's process groups run such a call on the current stream. Other calls run on a stream of
    # the group, and two events order this stream and the current one.
    if settings.device.type != "cpu" and hasattr(options, "asyncOp"):
        options.asyncOp = False
    if call.root >= 0:
        options.rootRank = call.root
    if settings.reduction is not None and hasattr(options, "reduceOp"):
        options.reduceOp = settings.reduction.op
    return options


def _broadcast(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    options = _configured(c10d.BroadcastOptions(), call, settings)
    buffer = settings.buffer(call.outputs)
    if settings.rank == call.root:
        return StartedCall(group.broadcast([buffer.copy_in().tensor()], options))
    return StartedCall(group.broadcast([buffer.tensor()], options), [buffer])


def _all_reduce(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    assert settings.reduction is not None
    options = _configured(c10d.AllreduceOptions(), call, settings)
    buffer = settings.buffer(call.outputs).copy_in()
    return StartedCall(group.allreduce([buffer.tensor(settings.reduction.dtype)], options), [buffer])


def _reduce(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    assert settings.reduction is not None
    options = _configured(c10d.ReduceOptions(), call, settings)
    buffer = settings.buffer(call.outputs).copy_in()
    values = buffer.tensor(settings.reduction.dtype)
    if settings.rank == call.root:
        return StartedCall(group.reduce([values], options), [buffer])
    return StartedCall(group.reduce([values.clone()], options))  # a copy, since it may receive partial sums


def _all_gather(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    options = _configured(c10d.AllgatherOptions(), call, settings)
    output = settings.buffer(call.outputs)
    given = settings.buffer(call.inputs).copy_in()
    return StartedCall(group._allgather_base(output.tensor(), given.tensor(), options), [output])


def _gather(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    options = _configured(c10d.GatherOptions(), call, settings)
    outputs = [settings.buffer([pieces]) for pieces in call.outputs]
    given = settings.buffer(call.inputs).copy_in().tensor()
    written = [[output.tensor() for output in outputs]] if outputs else []
    return StartedCall(group.gather(written, [given], options), outputs)


def _scatter(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    options = _configured(c10d.ScatterOptions(), call, settings)
    inputs = [settings.buffer([pieces]).copy_in() for pieces in call.inputs]
    output = settings.buffer(call.outputs)
    read = [[given.tensor() for given in inputs]] if inputs else []
    return StartedCall(group.scatter([output.tensor()], read, options), [output])


def _reduce_scatter(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    assert settings.reduction is not None
    options = _configured(c10d.ReduceScatterOptions(), call, settings)
    given = settings.buffer(call.inputs).copy_in().tensor(settings.reduction.dtype)
    output = settings.buffer(call.outputs)
    return StartedCall(group._reduce_scatter_base(output.tensor(settings.reduction.dtype), given, options), [output])


def _all_to_all(group: TorchGroup, call: CollectiveCall, settings: CallSettings) -> StartedCall:
    options = _configured(c10d.AllToAllOptions(), call, settings)
    sent, received = ([sum(pieces[1::2]) for pieces in side] for side in (call.inputs, call.outputs))
    given = settings.buffer(call.inputs).copy_in().tensor()
    output = settings.buffer(call.outputs)
    # The sizes are passed even if they are equal, because without sizes a library may use a different operation.
    return StartedCall(group.alltoall_base(output.tensor(), given, received, sent, options), [output])


_CALLS: Mapping[Operation, Callable[[TorchGroup, CollectiveCall, CallSettings], StartedCall]] = {
    Operation.BROADCAST: _broadcast,
    Operation.ALL_REDUCE: _all_reduce,
    Operation.REDUCE: _reduce,
    Operation.ALL_GATHER: _all_gather,
    Operation.GATHER: _gather,
    Operation.SCATTER: _scatter,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.ALL_TO_ALL: _all_to_all,
}


def is_empty(call: CollectiveCall) -> bool:
    """Returns True if a call moves no data on any rank, which each rank can determine locally."""
    return call.operation not in (Operation.BARRIER, Operation.ALL_TO_ALL) and call.count == 0
