"""Sends and receives over NCCL.

NCCL has no tags, and it runs the calls of a communicator one after the other, so two ranks that both send first would
wait for each other forever. Therefore each direction between two ranks, and each tag, has its own call stream. It opens
with the first message, on its own thread, since the other rank may come later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from paceline.engine.adapters.recording import GroupRecorder, Recorded
from paceline.engine.channel import HeaderFields, Pieces
from paceline.engine.failures import Failure
from paceline.engine.nccl.call_stream import CallStream, Flight
from paceline.engine.nccl.plan import Kind, Plan, Room, plan_message
from paceline.engine.nccl.watch import Watch
from paceline.engine.nccl.work import NcclMessage, NcclWork

OpenCallStream = Callable[[Sequence[int], str], CallStream]
"""Creates a call stream between two group ranks, the sender first; the text names it in the store."""

_Give = Callable[[], "Flight | Failure"]


class Lane:
    """A call stream, and the thread that enqueues messages on it in order."""

    def __init__(self, calls: CallStream, watch: Watch) -> None:
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

    def __init__(self, rank: int, open_call_stream: OpenCallStream, watch: Watch, recorder: GroupRecorder) -> None:
        self._rank = rank
        self._recorder = recorder
        self._open_call_stream = open_call_stream
        self._watch = watch
        self._lanes: dict[tuple[int, int, int], Lane] = {}
        self._opening = threading.Lock()

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group."""
        self._recorder.group = group

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool) -> NcclMessage:
        """Starts a send to a group rank, which always goes on by itself, whatever `background` is."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        return self._pass(Kind.SEND, self._rank, peer, tag, dtype, tensor, timeout_ns, recorded)

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
        return self._pass(Kind.RECEIVE, peer, self._rank, tag, dtype, tensor, timeout_ns, recorded)

    def _pass(
        self,
        kind: Kind,
        source: int,
        target: int,
        tag: int,
        dtype: int,
        tensor: Pieces,
        timeout_ns: int,
        recorded: Recorded,
    ) -> NcclMessage:
        with self._opening:
            lane = self._lanes.get((source, target, tag))
            if lane is None:
                calls = self._open_call_stream((source, target), f"{source}-{target}/{tag}")
                lane = self._lanes[source, target, tag] = Lane(calls, self._watch)
        calls = lane.calls
        calls.stream.follow()
        other_place = 1 if kind is Kind.SEND else 0
        header: HeaderFields = (0, 0, dtype, 0, -1, 0)
        message = NcclMessage(source)

        def make_plan(room: Room) -> Plan:
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
