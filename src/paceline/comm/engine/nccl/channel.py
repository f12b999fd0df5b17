"""Runs a group's collectives over NCCL.

Sends and receives over NCCL.

NCCL has no tags, and it runs the calls of a communicator one after the other, so two ranks that both send first would
wait for each other forever. Therefore each direction between two ranks, and each tag, has its own call stream. It opens
with the first message, on its own thread, since the other rank may come later.
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
    plan,
    plan_message,
    reduction,
)
from paceline.comm.schedule.steps import Operation

OpenCallStream = Callable[[Sequence[int], str], CallStream]
"""Creates a call stream between two group ranks, the sender first; the text names it in the store."""

_Give = Callable[[], "CallInFlight | CallFailure"]


class MessageQueue:
    """A call stream, and the thread that enqueues messages on it in order."""

    def __init__(self, calls: CallStream, watch: CallWatch) -> None:
        self.calls = calls
        self._watch = watch
        self._messages: SimpleQueue[tuple[NcclMessage, _Give] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="paceline-nccl-lane", daemon=True).start()

    def put(self, message: NcclMessage, give: _Give) -> None:
        """Queues a message behind those queued before; the lane's thread calls `give` to enqueue it on the stream."""
        self._messages.put((message, give))

    def close(self) -> None:
        """Closes the call stream and ends the thread; idempotent."""
        self._watch.remove(self.calls)
        self._messages.put(None)
        self.calls.close()

    def _run(self) -> None:
        while (entry := self._messages.get()) is not None:
            message, give = entry
            message.arrive(NcclWork(self.calls, give()))
            self._watch.wake()


class NcclMessages:
    """The messages between two ranks of a group; see `engine.channel.Messages`."""

    def __init__(self, rank: int, open_call_stream: OpenCallStream, watch: CallWatch, recorder: GroupRecorder) -> None:
        self._rank = rank
        self._recorder = recorder
        self._open_call_stream = open_call_stream
        self._watch = watch
        self._lanes: dict[tuple[int, int, int], MessageQueue] = {}
        self._opening = threading.Lock()

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group."""
        self._recorder.group = group

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool) -> NcclMessage:
        """Starts a send to a group rank, which always goes on by itself, whatever `background` is."""
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
            lane = self._lanes.get((source, target, tag))
            if lane is None:
                calls = self._open_call_stream((source, target), f"{source}-{target}/{tag}")
                lane = self._lanes[source, target, tag] = MessageQueue(calls, self._watch)
        calls = lane.calls
        calls.stream.follow()
        other_place = 1 if kind is NcclFunction.SEND else 0
        header: HeaderFields = (0, 0, dtype, 0, -1, 0)
        message = NcclMessage(source)

        def make_plan(room: AllocateBuffer) -> NcclPlan:
            return plan_message(kind, other_place, tensor, room)

        lane.put(message, lambda: calls.give(make_plan, None, header, timeout_ns, recorded))
        return message

    def leave(self) -> None:
        """Accepts no more messages; idempotent."""
        for lane in self._lanes.values():
            lane.calls.leave()

    def close(self) -> None:
        """Closes all lanes; idempotent."""
        for lane in self._lanes.values():
            lane.close()


_BARRIER_BYTES = 4
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class NcclChannel(EngineChannel):
    """Enqueues the calls of one group on a stream; see `engine.channel.Channel`.

    A call returns as soon as NCCL has accepted it, and the program's current stream waits until it is over. The watch
    aborts a call that can never end, and the next call reports the failure.
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
        """Runs a call, for which the current stream waits; for a barrier the thread waits, too."""
        work = self.submit(call)
        if call.operation == Operation.BARRIER:
            while not work.finish(call.timeout_ns):
                pass  # the watch ends a barrier that times out
        work.order()
        return work.outcome()

    def submit(self, call: CollectiveCall) -> NcclWork:
        """Enqueues a call behind those made before.

        Raises:
            TypeError: NCCL does not have the reduction for this dtype.
        """
        how = self._reduction(call)
        header = (0, call.operation, call.dtype, call.reduce_op, call.root, call.count)

        def make_plan(room: AllocateBuffer) -> NcclPlan:
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
        return OutcomeCode.OK if failure is None else failure.code

    def close(self) -> None:
        """Closes the call stream; idempotent."""
        self._watch.remove(self._calls)
        self._calls.close()

    def _reduction(self, call: CollectiveCall) -> NcclReduction | None:
        if call.operation not in _REDUCING:
            return None
        version = self._library.version
        how = reduction(call.dtype, call.reduce_op, version)
        if how is None:
            raise TypeError(
                f"{call.operation}: NCCL {format_version(version)} has no "
                f"{ReduceOp(call.reduce_op).name} of torch.{dtype_name(call.dtype)}; convert the tensor (to int32 or "
                "float32), or reduce it on CPU with the backend 'cpu:paceline,cuda:nccl'"
            )
        return how
