"""A group's collectives by NCCL."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.channel import Pieces
from paceline.engine.codes import ITEM_SIZES, Operation, ReduceCode, dtype_name
from paceline.engine.failures import Failure
from paceline.engine.nccl.call_stream import CallStream
from paceline.engine.nccl.loader import Library, say_version
from paceline.engine.nccl.plan import Plan, Room, plan
from paceline.engine.nccl.types import Reduction, reduction
from paceline.engine.nccl.watch import Watch
from paceline.engine.nccl.work import NcclWork

_BARRIER_BYTES = 4
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class NcclChannel:
    """Puts the calls of one group into a stream; see `engine.channel.Channel`.

    The calls return when NCCL has them, and the program's current stream waits for their ends. A call that never ends
    is ended by the watch, and the next one tells.
    """

    def __init__(self, library: Library, calls: CallStream, watch: Watch, rank: int) -> None:
        self._library = library
        self._calls = calls
        self._watch = watch
        self._rank = rank

    def all_reduce(self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int) -> Failure | None:
        """Of one dense tensor, in place."""
        outputs = [[address, count * ITEM_SIZES[dtype]]]
        return self.run(Operation.ALL_REDUCE, dtype, reduce_op, -1, count, timeout_ns, [], outputs)

    def run(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Pieces],
        outputs: Sequence[Pieces],
    ) -> Failure | None:
        """Any call; the current stream waits for it. A barrier has the thread wait."""
        work = self.submit(operation, dtype, reduce_op, root, count, timeout_ns, inputs, outputs)
        if operation == Operation.BARRIER:
            while not work.finish(timeout_ns):
                pass  # the watch ends it
        work.order()
        return work.outcome()

    def submit(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Pieces],
        outputs: Sequence[Pieces],
    ) -> NcclWork:
        """Any call, behind those made before.

        Raises:
            TypeError: NCCL does not have the reduction for the type.
        """
        how = self._reduction(operation, dtype, reduce_op)
        header = (0, operation, dtype, reduce_op, root, count)

        def make_plan(room: Room) -> Plan:
            if operation == Operation.BARRIER:
                everybody = [room(_BARRIER_BYTES), _BARRIER_BYTES]
                return plan(Operation.ALL_REDUCE, self._rank, root, [], [everybody], room)
            return plan(operation, self._rank, root, inputs, outputs, room)

        self._calls.stream.follow()
        given = self._calls.give(make_plan, how, header, timeout_ns)
        self._watch.wake()
        return NcclWork(self._calls, given)

    def leave(self) -> None:
        """Takes no more calls; idempotent."""
        self._calls.leave()

    def close(self) -> None:
        """Ends the call stream; idempotent."""
        self._watch.remove(self._calls)
        self._calls.close()

    def _reduction(self, operation: int, dtype: int, reduce_op: int) -> Reduction | None:
        if operation not in _REDUCING:
            return None
        version = self._library.version
        how = reduction(dtype, reduce_op, version)
        if how is None:
            raise TypeError(
                f"{Operation(operation).name.lower()}: NCCL {say_version(version)} has no {ReduceCode(reduce_op).name} "
                f"of torch.{dtype_name(dtype)}; convert the tensor (to int32 or float32), or reduce it on CPU with the "
                "backend 'cpu:paceline,cuda:nccl'"
            )
        return how
