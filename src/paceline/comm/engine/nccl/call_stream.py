"""A communicator, which the first call opens, and the CUDA stream on which its calls run one after the other.

A thread that watches calls in progress, since the program's streams wait for them but none of its threads does.

Calls and messages in progress, for the group to wait for.
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
# A rank whose process has ended may have done its part of a call, which then ends soon.
_ARRIVING_S = 1.0


@dataclass(frozen=True)
class CallInFlight:
    """A call that is on the stream; `header` is as in failure reports, and `started` and `deadline` are of
    `time.monotonic`.
    """

    header: HeaderFields
    mark: StreamEvent
    started: float
    deadline: float
    recorded: RecordedOperation


@dataclass(frozen=True)
class StreamRanks:
    """The ranks that a call stream connects: `members` in the order of the communicator, with this rank in place `at`.

    `group_ranks` are their ranks in the group, for failure reports.
    """

    members: tuple[RankIdentity, ...]
    group_ranks: tuple[int, ...]
    at: int


class CallStream:
    """Runs calls one after the other; any thread may use it.

    Args:
        library: the NCCL library.
        device: the device that holds the tensors of the calls.
        store: a store for this call stream alone.
        ends: the ranks that the call stream connects.
        stopped: returns whether the engine is being closed.
    """

    def __init__(
        self, library: Library, device: Device, store: Store, ends: StreamRanks, stopped: Callable[[], bool]
    ) -> None:
        self._library = library
        self._leaving = False
        self._device = device
        self._store = store
        self._ends = ends
        self._engine_closes = stopped
        self._progress = RankProgress(PrefixStore("at", store), ends.at, len(ends.members))
        self._communicator: Communicator | None = None
        self._peers: PeerWatch | None = None
        self._peer_gone_since: float | None = None
        self._lock = threading.Lock()
        self._flights: deque[CallInFlight] = deque()
        self._sequence = 0
        self._closed = False
        self.failure: CallFailure | None = None  # once set, it is permanent
        self.stream = device.open_stream()

    def give(
        self,
        make_plan: MakePlan,
        reduction: NcclReduction | None,
        header: HeaderFields,
        timeout_ns: int,
        recorded: RecordedOperation,
    ) -> CallInFlight | CallFailure:
        """Enqueues a call on the stream; the first call opens the communicator, which waits for the other ranks."""
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
                    self._enqueue(self._communicator, make_plan, reduction, deadline)
                    recorded.start()
                    flight = CallInFlight(header, self.stream.mark(), started, deadline, recorded)
            except (AbsentError, NcclTimeoutError, NcclError, SharedGpuError, RuntimeError) as error:
                failure = self._break(self._failure_of(error, header, started))
                recorded.end(failure.code)
                return failure
            self._flights.append(flight)
        return flight

    def _failure_of(self, error: Exception, header: HeaderFields, started: float) -> CallFailure:
        """Returns why a call could not be enqueued; a RuntimeError is one of CUDA or of the store."""
        if isinstance(error, AbsentError):
            return self._timed_out(started, error.missing)
        if isinstance(error, NcclTimeoutError):
            return self._timed_out(started, self._progress.missing(header))
        return CallFailure(
            OutcomeCode.REFUSED, said=f"{error}. {_ADVICE}" if isinstance(error, NcclError) else str(error)
        )

    def _enqueue(
        self,
        communicator: Communicator,
        make_plan: MakePlan,
        reduction: NcclReduction | None,
        deadline: float,
    ) -> None:
        rooms: list[object] = []  # keeps the memory alive until all its uses are on the stream

        def room(nbytes: int) -> int:
            address, owner = self.stream.room(nbytes)
            rooms.append(owner)
            return address

        plan = make_plan(room)
        for copy in plan.before:
            self.stream.copy(copy.source, copy.target, copy.nbytes)
        if plan.calls:
            communicator.launch(plan.calls, reduction, self.stream.handle, deadline)
        for copy in plan.after:
            self.stream.copy(copy.source, copy.target, copy.nbytes)

    def look(self) -> bool:
        """Forgets calls that are over and breaks the stream if one cannot end; returns whether to look again soon."""
        if self.failure is not None:
            return False
        try:
            while self._flights and self._flights[0].mark.done():
                self._flights.popleft().recorded.end(OutcomeCode.OK)
        except RuntimeError as error:  # from CUDA; the program will see it as well
            self.failure = CallFailure(OutcomeCode.REFUSED, said=str(error))
            return False
        self._progress.tell()
        if not self._flights:
            return not self._progress.is_told
        failure = self._trouble(self._flights[0])
        if failure is None:
            return True
        with self._lock, self._device.activated():
            self._break(failure)
        return False

    def _trouble(self, oldest: CallInFlight) -> CallFailure | None:
        communicator, peers = self._communicator, self._peers
        assert communicator is not None and peers is not None
        gone = peers.gone()
        now = time.monotonic()
        if gone and self._peer_gone_since is None:
            self._peer_gone_since = now
        if self._peer_gone_since is not None and now - self._peer_gone_since > _ARRIVING_S:
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
        by_group_rank: list[HeaderFields] = [(0, 0, 0, 0, -1, 0)] * (1 + max(self._ends.group_ranks))
        for group_rank, call in zip(self._ends.group_ranks, calls, strict=True):
            by_group_rank[group_rank] = call
        mine = calls[self._ends.at]
        if any(call[0] == mine[0] and call != mine for call in calls):
            here = self._ends.group_ranks[self._ends.at]
            return CallFailure(
                OutcomeCode.MISMATCH, reporter=here, calls=by_group_rank, algorithms=[0] * len(by_group_rank)
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
        ends, functions = self._ends, self._library.functions
        mine = NcclPeer.here(self._device.identity, str(self._device))
        met = exchange_peers(
            PrefixStore("meet", self._store), ends.members, ends.at, mine, functions.new_id, deadline, self._stopped
        )
        self._peers = PeerWatch(met.presences, ends.at)
        return Communicator(functions, met.unique_id, ends.at, len(ends.members), deadline, self._stopped)

    def _stopped(self) -> bool:
        return self._leaving or self._engine_closes()

    def _group_ranks(self, places: Sequence[int]) -> list[int]:
        return [self._ends.group_ranks[place] for place in places]

    def abort(self) -> None:
        """Ends the calls on the stream and accepts no more; the other ranks' calls end with their time-out."""
        self._leaving = True
        with self._lock, self._device.activated():
            self._break(CallFailure(OutcomeCode.ABORTED))

    def leave(self) -> None:
        """Accepts no more calls and ends one that still waits for other ranks; `close` must follow. Idempotent."""
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


_EVERY_S = 0.05


class CallWatch:
    """Looks at call streams for as long as one of them has a call in progress, until `close` is called."""

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
        self._streams = [each for each in self._streams if each is not calls]

    def wake(self) -> None:
        """Tells the thread that there is a new call."""
        self._called.set()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._closing.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()  # before the pause: `close` may come at any time after it
            if self._closing.wait(_EVERY_S):
                return
            for calls in self._streams:
                if calls.look():
                    self._called.set()


# A time-out of this length or more is no limit: the program's stream waits for the call, and its thread goes on.
_NO_LIMIT_NS = 1 << 61
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.001


class NcclWork:
    """A call that was enqueued on `calls`, or the reason why it was not."""

    def __init__(self, calls: CallStream, given: CallInFlight | CallFailure) -> None:
        self._calls = calls
        self._given = given
        self._went_well = False

    def done(self) -> bool:
        """Whether it is over, well or not."""
        if self._failure() is not None:
            return True
        assert isinstance(self._given, CallInFlight)
        # The mark is read before the failure is, since an abort also ends what is on the stream.
        passed = self._given.mark.done()
        self._went_well = passed and self._calls.failure is None
        return passed

    def wait(self, timeout_ns: int) -> bool:
        """Makes the current stream wait for the call, and with a time-out the thread; returns False if it timed out."""
        if timeout_ns < _NO_LIMIT_NS and not self.finish(timeout_ns):
            return False
        self.order()
        return True

    def order(self) -> None:
        """Makes the current stream wait until the call is over."""
        if isinstance(self._given, CallInFlight):
            self._given.mark.order()

    def finish(self, timeout_ns: int) -> bool:
        """Makes the thread wait until the call is over; returns False if the time was over first."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        pause_s = _FIRST_PAUSE_S
        while not self.done():
            if time.monotonic_ns() > deadline_ns:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def outcome(self) -> CallFailure | None:
        """Why it failed, as far as that is known by now."""
        return self._failure()

    def _failure(self) -> CallFailure | None:
        if isinstance(self._given, CallFailure):
            return self._given
        return None if self._went_well else self._calls.failure


class NcclMessage:
    """A send or a receive, which a lane's thread enqueues on its call stream."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._arrived = threading.Event()
        self._work: NcclWork | None = None

    def arrive(self, work: NcclWork) -> None:
        """Marks the message as enqueued on its call stream."""
        self._work = work
        self._arrived.set()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._work is not None and self._work.done()

    def wait(self, timeout_ns: int) -> bool:
        """Waits until the call stream is open, for which the other rank must come, and then as `NcclWork.wait`."""
        started_ns = time.monotonic_ns()
        if not self._arrived.wait(event_timeout_s(timeout_ns)):
            return False
        assert self._work is not None
        limited = timeout_ns < _NO_LIMIT_NS
        return self._work.wait(timeout_ns - (time.monotonic_ns() - started_ns) if limited else timeout_ns)

    def outcome(self) -> CallFailure | None:
        """Why it failed, as far as that is known by now."""
        return None if self._work is None else self._work.outcome()

    def source(self) -> int:
        """Returns the sender's group rank."""
        return self._source
