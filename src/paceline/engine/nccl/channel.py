"""Runs a group's collectives over NCCL."""

from __future__ import annotations

from paceline.engine.adapters.recording import GroupRecorder
from paceline.engine.channel import Call, Channel
from paceline.engine.codes import ReduceOp, dtype_name
from paceline.engine.failures import Code, Failure
from paceline.engine.nccl.call_stream import CallStream
from paceline.engine.nccl.loader import Library, say_version
from paceline.engine.nccl.plan import Plan, Room, plan
from paceline.engine.nccl.types import Reduction, reduction
from paceline.engine.nccl.watch import Watch
from paceline.engine.nccl.work import NcclWork
from paceline.schedule.steps import Operation

_BARRIER_BYTES = 4
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class NcclChannel(Channel):
    """Enqueues the calls of one group on a stream; see `engine.channel.Channel`.

    A call returns as soon as NCCL has accepted it, and the program's current stream waits until it is over. The watch
    aborts a call that can never end, and the next call reports the failure.
    """

    def __init__(self, library: Library, calls: CallStream, watch: Watch, rank: int, recorder: GroupRecorder) -> None:
        self._library = library
        self._calls = calls
        self._watch = watch
        self._rank = rank
        self._recorder = recorder

    def run(self, call: Call) -> Failure | None:
        """Runs a call, for which the current stream waits; for a barrier the thread waits, too."""
        work = self.submit(call)
        if call.operation == Operation.BARRIER:
            while not work.finish(call.timeout_ns):
                pass  # the watch ends a barrier that times out
        work.order()
        return work.outcome()

    def submit(self, call: Call) -> NcclWork:
        """Enqueues a call behind those made before.

        Raises:
            TypeError: NCCL does not have the reduction for this dtype.
        """
        how = self._reduction(call)
        header = (0, call.operation, call.dtype, call.reduce_op, call.root, call.count)

        def make_plan(room: Room) -> Plan:
            if call.operation == Operation.BARRIER:
                everybody = [room(_BARRIER_BYTES), _BARRIER_BYTES]
                return plan(Operation.ALL_REDUCE, self._rank, call.root, [], [everybody], room)
            return plan(call.operation, self._rank, call.root, call.inputs, call.outputs, room)

        self._calls.stream.follow()
        given = self._calls.give(make_plan, how, header, call.timeout_ns, self._recorder.call(call, is_async=True))
        self._watch.wake()
        return NcclWork(self._calls, given)

    def record_as(self, group: int) -> None:
        """Records the calls from now on as those of this group."""
        self._recorder.group = group

    def leave(self) -> None:
        """Accepts no more calls; idempotent."""
        self._calls.leave()

    def abort(self) -> None:
        """Ends the calls of this rank."""
        self._calls.abort()

    def failure(self) -> int:
        """Returns the code of the call stream's failure; OK without one."""
        failure = self._calls.failure
        return Code.OK if failure is None else failure.code

    def close(self) -> None:
        """Closes the call stream; idempotent."""
        self._watch.remove(self._calls)
        self._calls.close()

    def _reduction(self, call: Call) -> Reduction | None:
        if call.operation not in _REDUCING:
            return None
        version = self._library.version
        how = reduction(call.dtype, call.reduce_op, version)
        if how is None:
            raise TypeError(
                f"{call.operation}: NCCL {say_version(version)} has no "
                f"{ReduceOp(call.reduce_op).name} of torch.{dtype_name(call.dtype)}; convert the tensor (to int32 or "
                "float32), or reduce it on CPU with the backend 'cpu:paceline,cuda:nccl'"
            )
        return how
