"""A group's collectives over gloo; those that it lacks run by schedule over its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from paceline import _core
from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.executor import PythonExecutor
from paceline.engine.adapters.flat_buffer import FlatBuffer
from paceline.engine.adapters.serial_channel import SerialChannel
from paceline.engine.channel import Call
from paceline.engine.codes import DTYPES, NO_REDUCTION, ReduceOp
from paceline.engine.gloo.wire import SHORTEST, GlooWire, translated
from paceline.schedule.steps import Operation

_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVG: c10d.ReduceOp.SUM,
    ReduceOp.PREMUL_SUM: c10d.ReduceOp.SUM,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
}
_REDUCED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


class GlooChannel(SerialChannel):
    """A group's collectives over gloo.

    Args:
        group: torch's.
        store: what it was made with, and does not keep.
    """

    def __init__(
        self,
        group: c10d.ProcessGroupGloo,
        store: c10d.Store,
        diagnosis: FailureDiagnosis,
        rank: int,
        hosts: Sequence[Sequence[int]],
        algorithm: str | None,
    ) -> None:
        super().__init__(diagnosis)
        self._group = group
        self._store = store
        self._rank = rank
        self._size = sum(map(len, hosts))
        self._schedules = PythonExecutor(GlooWire(group), rank, hosts, algorithm)
        self._by_schedule = algorithm is not None

    def perform(self, call: Call) -> None:
        """Runs a call to its end."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        if call.operation != Operation.BARRIER and (self._by_schedule or not _has(call)):
            self._schedules.run(call, deadline_ns)
            return
        timeout = max(SHORTEST, timedelta(microseconds=call.timeout_ns / 1000))
        with translated(deadline_ns):
            _CALLS[call.operation](self, call, timeout)

    def _barrier(self, call: Call, timeout: timedelta) -> None:
        options = c10d.BarrierOptions()
        options.timeout = timeout
        self._group.barrier(options).wait()

    def _broadcast(self, call: Call, timeout: timedelta) -> None:
        options = c10d.BroadcastOptions()
        options.timeout, options.rootRank = timeout, call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.broadcast([tensor.tensor()], options).wait()
        tensor.copy_out()

    def _all_reduce(self, call: Call, timeout: timedelta) -> None:
        options = c10d.AllreduceOptions()
        options.timeout, options.reduceOp = timeout, _OPS[ReduceOp(call.reduce_op)]
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.allreduce([tensor.tensor(DTYPES[call.dtype])], options).wait()
        self._divide(tensor.address, call)
        tensor.copy_out()

    def _reduce(self, call: Call, timeout: timedelta) -> None:
        options = c10d.ReduceOptions()
        options.timeout, options.reduceOp, options.rootRank = timeout, _OPS[ReduceOp(call.reduce_op)], call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        values = tensor.tensor(DTYPES[call.dtype])
        if self._rank == call.root:
            self._group.reduce([values], options).wait()
            self._divide(tensor.address, call)
            tensor.copy_out()
        else:
            self._group.reduce([values.clone()], options).wait()  # gloo leaves partial sums there

    def _all_gather(self, call: Call, timeout: timedelta) -> None:
        options = c10d.AllgatherOptions()
        options.timeout = timeout
        outputs = [FlatBuffer([each]) for each in call.outputs]
        tensor = FlatBuffer(call.inputs).copy_in().tensor()
        self._group.allgather([[each.tensor() for each in outputs]], [tensor], options).wait()
        for each in outputs:
            each.copy_out()

    def _gather(self, call: Call, timeout: timedelta) -> None:
        options = c10d.GatherOptions()
        options.timeout, options.rootRank = timeout, call.root
        outputs = [FlatBuffer([each]) for each in call.outputs]
        written = [[each.tensor() for each in outputs]] if outputs else []
        self._group.gather(written, [FlatBuffer(call.inputs).copy_in().tensor()], options).wait()
        for each in outputs:
            each.copy_out()

    def _scatter(self, call: Call, timeout: timedelta) -> None:
        options = c10d.ScatterOptions()
        options.timeout, options.rootRank = timeout, call.root
        inputs = [FlatBuffer([each]).copy_in() for each in call.inputs]
        output = FlatBuffer(call.outputs)
        read = [[each.tensor() for each in inputs]] if inputs else []
        self._group.scatter([output.tensor()], read, options).wait()
        output.copy_out()

    def _divide(self, address: int, call: Call) -> None:
        if call.reduce_op == ReduceOp.AVG and call.count:
            _core.reduce(address, [address], call.count, call.dtype, ReduceOp.AVG, self._size)


_CALLS: dict[Operation, Callable[[GlooChannel, Call, timedelta], None]] = {
    Operation.BARRIER: GlooChannel._barrier,
    Operation.BROADCAST: GlooChannel._broadcast,
    Operation.ALL_REDUCE: GlooChannel._all_reduce,
    Operation.REDUCE: GlooChannel._reduce,
    Operation.ALL_GATHER: GlooChannel._all_gather,
    Operation.GATHER: GlooChannel._gather,
    Operation.SCATTER: GlooChannel._scatter,
}


def _has(call: Call) -> bool:
    """Whether gloo has the operation, and the reduction for the type."""
    if call.operation not in _CALLS or not call.count:
        return False
    if call.reduce_op == NO_REDUCTION:
        return True
    return call.reduce_op in _OPS and DTYPES[call.dtype] in _REDUCED
