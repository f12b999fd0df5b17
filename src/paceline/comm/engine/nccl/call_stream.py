"""`CallStream`: a communicator, which the first call opens, and the CUDA stream on which its calls run in order.

The program's streams wait for calls, but none of its threads does. `CallWatch` therefore has a thread that watches
calls in progress and aborts those that cannot complete. `NcclWork` and `NcclMessage` are the calls and messages for
which the group waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.comm.engine.adapters.group_recorder import RecordedOperation
from paceline.comm.engine.channel import HeaderFields
from paceline.comm.engine.failures import CallFailure, OutcomeCode, RankIdentity
from paceline.comm.engine.nccl.communicator import Communicator, NcclTimeoutError
from paceline.comm.engine.nccl.device import Device, StreamEvent
from paceline.comm.engine.nccl.library import Library, NcclError
from paceline.comm.engine.nccl.peers import (
    AbsentError,
    NcclPeer,
    PeerWatch,
    RankProgress,
    SharedGpuError,
    exchange_peers,
)
from paceline.comm.engine.nccl.plan import AllocateBuffer, NcclPlan, NcclReduction
from paceline.comm.store.store import PrefixStore, Store
from paceline.durations import event_timeout_s

MakePlan = Callable[[AllocateBuffer], NcclPlan]

_CLOSED = CallFailure(OutcomeCode.REFUSED, said="the group was closed meanwhile (destroy_process_group)")
_ADVICE = "NCCL_DEBUG=WARN has NCCL say more"
# A rank whose process has ended may have done its part of a call, which then completes soon.
_GRACE_S = 1.0


@dataclass(frozen=True)
class CallInFlight:
    """A call that is on the stream; `header` is as in failure reports, and times are those of `time.monotonic`."""

    header: HeaderFields
    mark: StreamEvent
    started: float
    deadline: float
    recorded: RecordedOperation


@dataclass(frozen=True)
class StreamRanks:
    """The ranks that a call stream connects, in the order of the communicator.

    Attributes:
        members: the ranks with their hosts and processes.
        group_ranks: their ranks in the group, for failure reports.
        index: the index of this rank among them.
    """

    members: tuple[RankIdentity, ...]
    group_ranks: tuple[int, ...]
    index: int


class CallStream:
    """Runs calls sequentially; any thread may use it.

    Args:
        library: the NCCL library.
        device: the device that holds the tensors of the calls.
        store: a store for this call stream alone.
        ranks: the ranks that the call stream connects.
        stopped: a function that returns whether the engine is being closed.
    """

    def __init__(
        self, library: Library, device: Device, store: Store, ranks: StreamRanks, stopped: Callable[[], bool]
    ) -> None:
        self._library = library
        self._leaving = False
        self._device = device
        self._store = store
        self._ranks = ranks
        self._engine_closes = stopped
        self._progress = RankProgress(PrefixStore("at", store), ranks.index, len(ranks.members))
        self._communicator: Communicator | None = None
        self._peers: PeerWatch | None = None
        self._peer_gone_since: float | None = None
        self._lock = threading.Lock()
        self._flights: deque[CallInFlight] = deque()
        self._sequence = 0
        self._closed = False
        self.failure: CallFailure | None = None  # once set, it is permanent
        self.stream = device.open_stream()

    def enqueue(
        self,
        make_plan: MakePlan,
        reduction: NcclReduction | None,
        header: HeaderFields,
        timeout_ns: int,
        recorded: RecordedOperation,
    ) -> CallInFlight | CallFailure:
        """Enqueues a call on the stream. The first call opens the communicator, which waits for the other ranks."""
        started = time.monotonic()
        deadline = started + timeout_ns / 1e9
        with self._lock:
            if self.failure is not None:
                recorded.end(self.failure.code)
                return self.failure
            self._sequence += 1
            header = (self._sequence, *header[1:])
            self._progress.arrive(header)
            try:
                with self._device.activated():
                    if self._communicator is None:
                        self._communicator = self._open(deadline)
                    self._launch(self._communicator, make_plan, reduction, deadline)
                    recorded.start()
                    flight = CallInFlight(header, self.stream.mark(), started, deadline, recorded)
            except (AbsentError, NcclTimeoutError, NcclError, SharedGpuError, RuntimeError) as error:
                failure = self._break(self._failure_of(error, header, started))
                recorded.end(failure.code)
                return failure
            self._flights.append(flight)
        return flight

    def _failure_of(self, error: Exception, header: HeaderFields, started: float) -> CallFailure:
        """Returns why a call could not be enqueued; a RuntimeError comes from CUDA or from the store."""
        if isinstance(error, AbsentError):
            return self._timed_out(started, error.missing)
        if isinstance(error, NcclTimeoutError):
            return self._timed_out(started, self._progress.missing(header))
        return CallFailure(
            OutcomeCode.REFUSED, said=f"{error}. {_ADVICE}" if isinstance(error, NcclError) else str(error)
        )

    def _launch(
        self,
        communicator: Communicator,
        make_plan: MakePlan,
        reduction: NcclReduction | None,
        deadline: float,
    ) -> None:
        owners: list[object] = []  # keeps the memory alive until all its uses are on the stream

        def allocate(nbytes: int) -> int:
            address, owner = self.stream.allocate(nbytes)
            owners.append(owner)
            return address

        plan = make_plan(allocate)
        for copy in plan.before:
            self.stream.copy(copy.source, copy.target, copy.nbytes)
        if plan.calls:
            communicator.launch(plan.calls, reduction, self.stream.handle, deadline)
        for copy in plan.after:
            self.stream.copy(copy.source, copy.target, copy.nbytes)

    def look(self) -> bool:
        """Drops completed calls, and breaks the stream if a call cannot complete; returns whether to look again."""
        if self.failure is not None:
            return False
        try:
            while self._flights and self._flights[0].mark.done():
                self._flights.popleft().recorded.end(OutcomeCode.OK)
        except RuntimeError as error:  # from CUDA; the program gets it as well
            self.failure = CallFailure(OutcomeCode.REFUSED, said=str(error))
            return False
        self._progress.publish()
        if not self._flights:
            return not self._progress.is_published
        failure = self._find_failure(self._flights[0])
        if failure is None:
            return True
        with self._lock, self._device.activated():
            self._break(failure)
        return False

    def _find_failure(self, oldest: CallInFlight) -> CallFailure | None:
        communicator, peers = self._communicator, self._peers
        assert communicator is not None and peers is not None
        gone = peers.gone()
        now = time.monotonic()
        if gone and self._peer_gone_since is None:
            self._peer_gone_since = now
        if self._peer_gone_since is not None and now - self._peer_gone_since > _GRACE_S:
            return CallFailure(OutcomeCode.PEER_LOST, gone=self._group_ranks(gone))
        said = communicator.error()
        if said is not None:
            return CallFailure(OutcomeCode.REFUSED, said=f"while the call was under way: {said}. {_ADVICE}")
        if now > oldest.deadline:
            return self._timed_out(oldest.started, self._progress.missing(oldest.header))
        return None

    def _timed_out(self, started: float, missing: Sequence[int]) -> CallFailure:
        if self._stopped():
            return _CLOSED
        waited_s = time.monotonic() - started
        calls = self._progress.latest()
        by_group_rank: list[HeaderFields] = [(0, 0, 0, 0, -1, 0)] * (1 + max(self._ranks.group_ranks))
        for group_rank, call in zip(self._ranks.group_ranks, calls, strict=True):
            by_group_rank[group_rank] = call
        mine = calls[self._ranks.index]
        if any(call[0] == mine[0] and call != mine for call in calls):
            me = self._ranks.group_ranks[self._ranks.index]
            return CallFailure(
                OutcomeCode.MISMATCH, reporter=me, calls=by_group_rank, algorithms=[0] * len(by_group_rank)
            )
        if not missing:
            return CallFailure(
                OutcomeCode.REFUSED,
                said=f"all ranks have made this call, and it was not over after {waited_s:.1f} s: either it needs "
                f"longer than the time-out (raise timeout=), or the GPUs do not reach each other. {_ADVICE}",
            )
        return CallFailure(
            OutcomeCode.TIMED_OUT,
            missing=self._group_ranks(missing),
            waited_ns=int(waited_s * 1e9),
            calls=by_group_rank,
        )

    def _break(self, failure: CallFailure) -> CallFailure:
        if self.failure is None:
            self.failure = failure
            for flight in self._flights:
                flight.recorded.end(failure.code)
            if self._communicator is not None:
                self._communicator.abort()
        return self.failure

    def _open(self, deadline: float) -> Communicator:
        ranks, functions = self._ranks, self._library.functions
        mine = NcclPeer.here(self._device.identity, str(self._device))
        exchanged = exchange_peers(
            PrefixStore("meet", self._store),
            ranks.members,
            ranks.index,
            mine,
            functions.new_id,
            deadline,
            self._stopped,
        )
        self._peers = PeerWatch(exchanged.peers, ranks.index)
        return Communicator(functions, exchanged.unique_id, ranks.index, len(ranks.members), deadline, self._stopped)

    def _stopped(self) -> bool:
        return self._leaving or self._engine_closes()

    def _group_ranks(self, indices: Sequence[int]) -> list[int]:
        return [self._ranks.group_ranks[index] for index in indices]

    def abort(self) -> None:
        """Ends the calls on the stream and accepts no more; the other ranks' calls end at their time-outs."""
        self._leaving = True
        with self._lock, self._device.activated():
            self._break(CallFailure(OutcomeCode.ABORTED))

    def leave(self) -> None:
        """Accepts no more calls and ends one that still waits for other ranks. `close` must follow. Idempotent."""
        self._leaving = True
        with self._lock:
            if self.failure is None:
                self.failure = _CLOSED
                if self._communicator is not None:
                    with self._device.activated():
                        self._communicator.leave()

    def close(self) -> None:
        """Closes the communicator; idempotent."""
        self.leave()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._communicator is not None:
                with self._device.activated():
                    self._communicator.close()
            if self._peers is not None:
                self._peers.close()


_WATCH_INTERVAL_S = 0.05


class CallWatch:
    """Polls call streams while one of them has a call in progress, until `close` is called."""

    def __init__(self) -> None:
        self._streams: list[CallStream] = []
        self._called = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-nccl-watch", daemon=True)
        self._thread.start()

    def add(self, calls: CallStream) -> None:
        """Starts watching `calls`."""
        self._streams = [*self._streams, calls]

    def remove(self, calls: CallStream) -> None:
        """Stops watching `calls`."""
        self._streams = [stream for stream in self._streams if stream is not calls]

    def wake(self) -> None:
        """Wakes the thread for a new call."""
        self._called.set()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._closing.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()  # before the pause, since `close` may be called at any time after this
            if self._closing.wait(_WATCH_INTERVAL_S):
                return
            for calls in self._streams:
                if calls.look():
                    self._called.set()


# A time-out of at least this length is no limit: the program's stream waits for the call, and its thread continues.
_NO_LIMIT_NS = 1 << 61
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.001


class NcclWork:
    """A call that was enqueued on `calls`, or the reason why it was not."""

    def __init__(self, calls: CallStream, result: CallInFlight | CallFailure) -> None:
        self._calls = calls
        self._result = result
        self._succeeded = False

    def done(self) -> bool:
        """Returns whether the call is complete, successfully or not."""
        if self._failure() is not None:
            return True
        assert isinstance(self._result, CallInFlight)
        # The mark is read before the failure, since an abort also completes the calls on the stream.
        passed = self._result.mark.done()
        self._succeeded = passed and self._calls.failure is None
        return passed

    def wait(self, timeout_ns: int) -> bool:
        """Makes the current stream wait for the call and, with a time-out, the thread; returns False on time-out."""
        if timeout_ns < _NO_LIMIT_NS and not self.finish(timeout_ns):
            return False
        self.order()
        return True

    def is_enqueued(self) -> bool:
        """Returns True: the call is on the stream, or has failed."""
        return True

    def order(self) -> None:
        """Makes the current stream wait for the call."""
        if isinstance(self._result, CallInFlight):
            self._result.mark.order()

    def finish(self, timeout_ns: int) -> bool:
        """Makes the thread wait for the call; returns False on time-out."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        pause_s = _FIRST_PAUSE_S
        while not self.done():
            if time.monotonic_ns() > deadline_ns:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def outcome(self) -> CallFailure | None:
        """Returns why the call failed, if that is known yet."""
        return self._failure()

    def _failure(self) -> CallFailure | None:
        if isinstance(self._result, CallFailure):
            return self._result
        return None if self._succeeded else self._calls.failure


class NcclMessage:
    """A send or a receive, which the thread of a `MessageQueue` enqueues on a call stream."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._enqueued = threading.Event()
        self._work: NcclWork | None = None

    def mark_enqueued(self, work: NcclWork) -> None:
        """Marks the message as enqueued on its call stream."""
        self._work = work
        self._enqueued.set()

    def is_enqueued(self) -> bool:
        """Returns whether the message is on its call stream, which requires the other rank."""
        return self._enqueued.is_set()

    def done(self) -> bool:
        """Returns whether the message is complete, successfully or not."""
        return self._work is not None and self._work.done()

    def wait(self, timeout_ns: int) -> bool:
        """Waits until the call stream is open, which requires the other rank, and then as `NcclWork.wait`."""
        started_ns = time.monotonic_ns()
        if not self._enqueued.wait(event_timeout_s(timeout_ns)):
            return False
        assert self._work is not None
        limited = timeout_ns < _NO_LIMIT_NS
        return self._work.wait(timeout_ns - (time.monotonic_ns() - started_ns) if limited else timeout_ns)

    def outcome(self) -> CallFailure | None:
        """Returns why the message failed, if that is known yet."""
        return None if self._work is None else self._work.outcome()

    def source(self) -> int:
        """Returns the sender's group rank."""
        return self._source
