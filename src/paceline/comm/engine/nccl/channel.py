"""A group's collectives and messages over NCCL.

NCCL has no tags, and it runs the calls of a communicator in order, so two ranks that both send first would wait for
each other forever. Therefore each direction between two ranks, and each tag, has its own call stream. The first message
opens it on a thread of its own, since the other rank may be late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from paceline.comm.engine.adapters.group_recorder import GroupRecorder, RecordedOperation
from paceline.comm.engine.channel import CollectiveCall, EngineChannel, HeaderFields, Pieces
from paceline.comm.engine.codes import ReduceOp, dtype_name
from paceline.comm.engine.failures import CallFailure, OutcomeCode
from paceline.comm.engine.nccl.call_stream import CallInFlight, CallStream, CallWatch, NcclMessage, NcclWork
from paceline.comm.engine.nccl.library import Library, format_version
from paceline.comm.engine.nccl.plan import (
    AllocateBuffer,
    NcclFunction,
    NcclPlan,
    NcclReduction,
    find_reduction,
    plan,
    plan_message,
)
from paceline.comm.schedule.steps import Operation

OpenCallStream = Callable[[Sequence[int], str], CallStream]
"""Creates a call stream between two group ranks, the sender first; the text names it in the store."""

_Enqueue = Callable[[], "CallInFlight | CallFailure"]


class MessageQueue:
    """A call stream for messages, and the thread that enqueues them on it in order."""

    def __init__(self, calls: CallStream, watch: CallWatch) -> None:
        self.calls = calls
        self._watch = watch
        self._messages: SimpleQueue[tuple[NcclMessage, _Enqueue] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="paceline-nccl-lane", daemon=True).start()

    def put(self, message: NcclMessage, enqueue: _Enqueue) -> None:
        """Queues a message behind earlier ones; the thread calls `enqueue` to enqueue it on the stream."""
        self._messages.put((message, enqueue))

    def close(self) -> None:
        """Closes the call stream and ends the thread; idempotent."""
        self._watch.remove(self.calls)
        self._messages.put(None)
        self.calls.close()

    def _run(self) -> None:
        while (entry := self._messages.get()) is not None:
            message, enqueue = entry
            message.mark_enqueued(NcclWork(self.calls, enqueue()))
            self._watch.wake()


class NcclMessages:
    """The messages between two ranks of a group; see `engine.channel.Messages`."""

    def __init__(self, rank: int, open_call_stream: OpenCallStream, watch: CallWatch, recorder: GroupRecorder) -> None:
        self._rank = rank
        self._recorder = recorder
        self._open_call_stream = open_call_stream
        self._watch = watch
        self._queues: dict[tuple[int, int, int], MessageQueue] = {}
        self._opening = threading.Lock()

    def record_messages_as(self, group: int, /) -> None:
        """Records later messages under the group's serial number."""
        self._recorder.group = group

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool) -> NcclMessage:
        """Starts a send to a group rank, which always proceeds in the background."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        return self._pass(NcclFunction.SEND, self._rank, peer, tag, dtype, tensor, timeout_ns, recorded)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool
    ) -> NcclMessage:
        """Starts a receive from a group rank.

        Raises:
            ValueError: `peer` is -1 (any rank), which NCCL does not support.
        """
        if peer < 0:
            raise ValueError("recv from any rank: NCCL receives from one that is named; pass src=, or use CPU tensors")
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        return self._pass(NcclFunction.RECEIVE, peer, self._rank, tag, dtype, tensor, timeout_ns, recorded)

    def _pass(
        self,
        kind: NcclFunction,
        source: int,
        target: int,
        tag: int,
        dtype: int,
        tensor: Pieces,
        timeout_ns: int,
        recorded: RecordedOperation,
    ) -> NcclMessage:
        with self._opening:
            queue = self._queues.get((source, target, tag))
            if queue is None:
                calls = self._open_call_stream((source, target), f"{source}-{target}/{tag}")
                queue = self._queues[source, target, tag] = MessageQueue(calls, self._watch)
        calls = queue.calls
        calls.stream.follow()
        other_end = 1 if kind is NcclFunction.SEND else 0
        header: HeaderFields = (0, 0, dtype, 0, -1, 0)
        message = NcclMessage(source)

        def make_plan(allocate: AllocateBuffer) -> NcclPlan:
            return plan_message(kind, other_end, tensor, allocate)

        queue.put(message, lambda: calls.enqueue(make_plan, None, header, timeout_ns, recorded))
        return message

    def leave(self) -> None:
        """Accepts no more messages; idempotent."""
        for queue in self._queues.values():
            queue.calls.leave()

    def close(self) -> None:
        """Closes all queues; idempotent."""
        for queue in self._queues.values():
            queue.close()


_BARRIER_BYTES = 4
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class NcclChannel(EngineChannel):
    """Enqueues the calls of one group on a stream; see `engine.channel.EngineChannel`.

    A call returns as soon as NCCL has accepted it, and the program's current stream waits for it. The watch aborts a
    call that cannot complete, and the next call reports the failure.
    """

    def __init__(
        self, library: Library, calls: CallStream, watch: CallWatch, rank: int, recorder: GroupRecorder
    ) -> None:
        self._library = library
        self._calls = calls
        self._watch = watch
        self._rank = rank
        self._recorder = recorder

    def run(self, call: CollectiveCall) -> CallFailure | None:
        """Runs a call, for which the current stream waits and, if it is a barrier, the thread too."""
        work = self.submit(call)
        if call.operation == Operation.BARRIER:
            while not work.finish(call.timeout_ns):
                pass  # the watch aborts a barrier that times out
        work.order()
        return work.outcome()

    def submit(self, call: CollectiveCall) -> NcclWork:
        """Enqueues a call behind earlier ones.

        Raises:
            TypeError: NCCL does not have the reduction for this dtype.
        """
        reduction = self._reduction(call)
        header = (0, call.operation, call.dtype, call.reduce_op, call.root, call.count)

        def make_plan(allocate: AllocateBuffer) -> NcclPlan:
            if call.operation == Operation.BARRIER:
                tensor = [allocate(_BARRIER_BYTES), _BARRIER_BYTES]
                return plan(Operation.ALL_REDUCE, self._rank, call.root, [], [tensor], allocate)
            return plan(call.operation, self._rank, call.root, call.inputs, call.outputs, allocate)

        self._calls.stream.follow()
        recorded = self._recorder.call(call, is_async=True)
        result = self._calls.enqueue(make_plan, reduction, header, call.timeout_ns, recorded)
        self._watch.wake()
        return NcclWork(self._calls, result)

    def record_as(self, group: int) -> None:
        """Records later calls under the group's serial number."""
        self._recorder.group = group

    def leave(self) -> None:
        """Accepts no more calls; idempotent."""
        self._calls.leave()

    def abort(self) -> None:
        """Ends the calls of this rank."""
        self._calls.abort()

    def failure(self) -> int:
        """Returns the code of the call stream's failure, or OK."""
        failure = self._calls.failure
        return OutcomeCode.OK if failure is None else failure.code

    def close(self) -> None:
        """Closes the call stream; idempotent."""
        self._watch.remove(self._calls)
        self._calls.close()

    def _reduction(self, call: CollectiveCall) -> NcclReduction | None:
        if call.operation not in _REDUCING:
            return None
        version = self._library.version
        reduction = find_reduction(call.dtype, call.reduce_op, version)
        if reduction is None:
            raise TypeError(
                f"{call.operation}: NCCL {format_version(version)} has no "
                f"{ReduceOp(call.reduce_op).name} of torch.{dtype_name(call.dtype)}; convert the tensor (to int32 or "
                "float32), or reduce it on CPU with the backend 'cpu:paceline,cuda:nccl'"
            )
        return reduction
