"""Runs a group's collectives over MPI, directly on the tensors' memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline import _core
from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.executor import PythonExecutor, Transfer
from paceline.engine.adapters.flat_buffer import FlatBuffer
from paceline.engine.adapters.serial_channel import SerialChannel
from paceline.engine.channel import Call, Outcome, Pieces
from paceline.engine.codes import ITEM_SIZES, ReduceOp
from paceline.engine.failures import Code
from paceline.engine.mpi.library import MOST_BYTES, library
from paceline.engine.mpi.requests import complete
from paceline.engine.mpi.types import datatype, reduction
from paceline.schedule.steps import Operation

_MOST_ELEMENTS = 1 << 26
_SMALL = 1 << 14
# From this size on, Open MPI's non-blocking all-reduce takes twice as long as a schedule over its messages.
_SCHEDULED_BYTES = 1 << 20
_AT_ONCE = range(20)  # tests of a request before other threads may take the lock
_AVG = int(ReduceOp.AVG)
_ALL_REDUCE = int(Operation.ALL_REDUCE)


class MpiChannel(SerialChannel):
    """Runs calls as MPI's non-blocking collectives.

    Args:
        comm: the group's communicator.
        lock: the lock that is held during every call of MPI.
        diagnosis: finds out why a call failed.
        hosts: the group ranks of each host.
        algorithm: the algorithm by which all collectives run as schedules; None lets MPI run those that it can.
    """

    def __init__(
        self,
        comm: Any,
        lock: threading.Lock,
        diagnosis: FailureDiagnosis,
        hosts: Sequence[Sequence[int]],
        algorithm: str | None,
    ) -> None:
        super().__init__(diagnosis)
        self._mpi = library()
        self._known: dict[int, tuple[Any, Any]] = {}
        self._from_address = self._mpi.buffer.fromaddress
        self._comm = comm
        self._lock = lock
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._schedules = PythonExecutor(_MpiWire(comm, lock), self._rank, hosts, algorithm)
        self._by_schedule = algorithm is not None

    def all_reduce(self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /) -> Outcome | None:
        """Reduces one dense tensor in place; a small one skips the steps of the general path."""
        if count > _SMALL or not count or reduce_op == _AVG or self._by_schedule or self._waiting:
            return super().all_reduce(address, count, dtype, reduce_op, timeout_ns)
        key = dtype << 4 | reduce_op
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = datatype(dtype), reduction(dtype, reduce_op)
        part = [self._from_address(address, count * ITEM_SIZES[dtype]), count, known[0]]
        with self._turn:
            if self._broken is not None:
                return self._broken
            self._note(_ALL_REDUCE, dtype, reduce_op, -1, count)
            recorded = self._recorder.small_call(_ALL_REDUCE, dtype, reduce_op, count, count * ITEM_SIZES[dtype])
            started_ns = time.monotonic_ns()
            try:
                with self._lock:
                    request = self._comm.Iallreduce(self._mpi.IN_PLACE, part, known[1])
                    is_over = any(request.Test() for _ in _AT_ONCE)
                if not is_over:
                    complete(request, self._lock, started_ns + timeout_ns)
                recorded.end(Code.OK)
                return None
            except Exception as error:
                outcome = self._break(error, started_ns)
                recorded.end(outcome.code)
                return outcome

    def perform(self, call: Call) -> None:
        """Runs a call to its end."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        operation = call.operation
        if operation is not Operation.BARRIER and (self._by_schedule or _is_long(call) or self._is_too_long(call)):
            self._schedules.run(call, deadline_ns)
        else:
            _CALLS[operation](self, call, deadline_ns)

    def _is_too_long(self, call: Call) -> bool:
        """Returns whether a call moves more bytes than one call of MPI can take, and cannot be cut into several."""
        if call.operation in _CUT:
            return False
        return sum(sum(each[1::2]) for each in (*call.inputs, *call.outputs)) > MOST_BYTES

    def _barrier(self, _: Call, deadline_ns: int) -> None:
        self._run(deadline_ns, self._comm.Ibarrier)

    def _broadcast(self, call: Call, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        for at in range(0, tensor.nbytes, MOST_BYTES):
            nbytes = min(MOST_BYTES, tensor.nbytes - at)
            self._run(deadline_ns, self._comm.Ibcast, self._bytes(tensor.address + at, nbytes), call.root)
        tensor.copy_out()

    def _all_reduce(self, call: Call, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        op = reduction(call.dtype, call.reduce_op)
        for part in self._parts(tensor.address, call):
            self._run(deadline_ns, self._comm.Iallreduce, self._mpi.IN_PLACE, part, op)
        self._divide(tensor.address, call)
        tensor.copy_out()

    def _reduce(self, call: Call, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        op = reduction(call.dtype, call.reduce_op)
        is_root = self._rank == call.root
        for part in self._parts(tensor.address, call):
            ends = (self._mpi.IN_PLACE, part) if is_root else (part, None)
            self._run(deadline_ns, self._comm.Ireduce, *ends, op, call.root)
        if is_root:
            self._divide(tensor.address, call)
            tensor.copy_out()

    def _all_gather(self, call: Call, deadline_ns: int) -> None:
        outputs = FlatBuffer(call.outputs)
        source = _apart(call.inputs, outputs)
        ends = self._bytes(source.address, source.nbytes), self._bytes(outputs.address, source.nbytes)
        self._run(deadline_ns, self._comm.Iallgather, *ends)
        outputs.copy_out()

    def _gather(self, call: Call, deadline_ns: int) -> None:
        outputs = FlatBuffer(call.outputs)
        source = _apart(call.inputs, outputs)
        target = self._bytes(outputs.address, source.nbytes) if call.outputs else None
        ends = self._bytes(source.address, source.nbytes), target
        self._run(deadline_ns, self._comm.Igather, *ends, call.root)
        outputs.copy_out()

    def _scatter(self, call: Call, deadline_ns: int) -> None:
        output = FlatBuffer(call.outputs)
        inputs = _apart(call.inputs, output)
        source = self._bytes(inputs.address, output.nbytes) if call.inputs else None
        ends = source, self._bytes(output.address, output.nbytes)
        self._run(deadline_ns, self._comm.Iscatter, *ends, call.root)
        output.copy_out()

    def _reduce_scatter(self, call: Call, deadline_ns: int) -> None:
        output = FlatBuffer(call.outputs)
        inputs = _apart(call.inputs, output)
        kind, op = datatype(call.dtype), reduction(call.dtype, call.reduce_op)
        ends = (
            [self._from_address(inputs.address, inputs.nbytes), call.count, kind],
            [self._from_address(output.address, output.nbytes), call.count, kind],
        )
        self._run(deadline_ns, self._comm.Ireduce_scatter_block, *ends, op)
        self._divide(output.address, call)
        output.copy_out()

    def _all_to_all(self, call: Call, deadline_ns: int) -> None:
        outputs = FlatBuffer(call.outputs)
        inputs = _apart(call.inputs, outputs)
        ends = [
            [self._from_address(each.address, each.nbytes), _sizes(pieces), self._mpi.BYTE]
            for each, pieces in ((inputs, call.inputs), (outputs, call.outputs))
        ]
        self._run(deadline_ns, self._comm.Ialltoallv, *ends)
        outputs.copy_out()

    def _run(self, deadline_ns: int, post: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            request = post(*arguments)
        complete(request, self._lock, deadline_ns)

    def _bytes(self, address: int, nbytes: int) -> list[Any]:
        return [self._from_address(address, nbytes), nbytes, self._mpi.BYTE]

    def _parts(self, address: int, call: Call) -> list[list[Any]]:
        item_size, kind = ITEM_SIZES[call.dtype], datatype(call.dtype)
        parts = []
        for first in range(0, call.count, _MOST_ELEMENTS):
            count = min(_MOST_ELEMENTS, call.count - first)
            memory = self._from_address(address + first * item_size, count * item_size)
            parts.append([memory, count, kind])
        return parts

    def _divide(self, address: int, call: Call) -> None:
        if call.reduce_op == ReduceOp.AVG and call.count:
            _core.reduce(address, [address], call.count, call.dtype, ReduceOp.AVG, self._size)


_CUT = (Operation.BROADCAST, Operation.ALL_REDUCE, Operation.REDUCE)
_CALLS: dict[Operation, Callable[[MpiChannel, Call, int], None]] = {
    Operation.BARRIER: MpiChannel._barrier,
    Operation.BROADCAST: MpiChannel._broadcast,
    Operation.ALL_REDUCE: MpiChannel._all_reduce,
    Operation.REDUCE: MpiChannel._reduce,
    Operation.ALL_GATHER: MpiChannel._all_gather,
    Operation.GATHER: MpiChannel._gather,
    Operation.SCATTER: MpiChannel._scatter,
    Operation.REDUCE_SCATTER: MpiChannel._reduce_scatter,
    Operation.ALL_TO_ALL: MpiChannel._all_to_all,
}


def _is_long(call: Call) -> bool:
    return call.operation == Operation.ALL_REDUCE and call.count * ITEM_SIZES[call.dtype] >= _SCHEDULED_BYTES


class _Apart:
    """A copy of a buffer to read that overlaps a buffer to write, which MPI does not allow."""

    def __init__(self, source: FlatBuffer) -> None:
        self._memory = source.tensor().clone()
        self.address, self.nbytes = self._memory.data_ptr(), source.nbytes


def _apart(inputs: Sequence[Pieces], written: FlatBuffer) -> FlatBuffer | _Apart:
    source = FlatBuffer(inputs).copy_in()
    overlap = source.address < written.address + written.nbytes and written.address < source.address + source.nbytes
    return _Apart(source) if overlap else source


def _sizes(pieces: Sequence[Pieces]) -> list[int]:
    return [sum(each[1::2]) for each in pieces]


class _MpiTransfer:
    def __init__(self, requests: Sequence[Any], lock: threading.Lock) -> None:
        self._requests = requests
        self._lock = lock

    def wait(self, deadline_ns: int) -> None:
        for request in self._requests:
            complete(request, self._lock, deadline_ns)


class _MpiWire:
    def __init__(self, comm: Any, lock: threading.Lock) -> None:
        self._comm = comm
        self._lock = lock

    def send(self, peer: int, address: int, nbytes: int) -> Transfer:
        return self._post(self._comm.Isend, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> Transfer:
        return self._post(self._comm.Irecv, peer, address, nbytes)

    def _post(self, post: Callable[..., Any], peer: int, address: int, nbytes: int) -> Transfer:
        mpi = library()
        requests = []
        for at in range(0, nbytes, MOST_BYTES):
            part = min(MOST_BYTES, nbytes - at)
            with self._lock:
                requests.append(post([mpi.buffer.fromaddress(address + at, part), part, mpi.BYTE], peer))
        return _MpiTransfer(requests, self._lock)
