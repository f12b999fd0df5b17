"""A communicator, which the first call opens, and the CUDA stream on which its calls run one after the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.adapters.recording import Recorded
from paceline.engine.channel import HeaderFields
from paceline.engine.failures import Code, Failure, Member
from paceline.engine.nccl.communicator import Communicator, NcclTimeoutError
from paceline.engine.nccl.device import Device, Mark
from paceline.engine.nccl.functions import NcclError
from paceline.engine.nccl.loader import Library
from paceline.engine.nccl.meeting import AbsentError, Presence, SharedGpuError, meet
from paceline.engine.nccl.peers import Peers
from paceline.engine.nccl.plan import Plan, Room
from paceline.engine.nccl.progress import RankProgress
from paceline.engine.nccl.types import Reduction
from paceline.store.base import Store
from paceline.store.prefix import PrefixStore

MakePlan = Callable[[Room], Plan]

_CLOSED = Failure(Code.REFUSED, said="the group was closed meanwhile (destroy_process_group)")
_ADVICE = "NCCL_DEBUG=WARN has NCCL say more"
# A rank whose process has ended may have done its part of a call, which then ends soon.
_ARRIVING_S = 1.0


@dataclass(frozen=True)
class Flight:
    """A call that is on the stream; `header` is as in failure reports, and `started` and `deadline` are of
    `time.monotonic`.
    """

    header: HeaderFields
    mark: Mark
    started: float
    deadline: float
    recorded: Recorded


@dataclass(frozen=True)
class Ends:
    """The ranks that a call stream connects: `members` in the order of the communicator, with this rank in place `at`.

    `group_ranks` are their ranks in the group, for failure reports.
    """

    members: tuple[Member, ...]
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

    def __init__(self, library: Library, device: Device, store: Store, ends: Ends, stopped: Callable[[], bool]) -> None:
        self._library = library
        self._leaving = False
        self._device = device
        self._store = store
        self._ends = ends
        self._engine_closes = stopped
        self._progress = RankProgress(PrefixStore("at", store), ends.at, len(ends.members))
        self._communicator: Communicator | None = None
        self._peers: Peers | None = None
        self._peer_gone_since: float | None = None
        self._lock = threading.Lock()
        self._flights: deque[Flight] = deque()
        self._sequence = 0
        self._closed = False
        self.failure: Failure | None = None  # once set, it is permanent
        self.stream = device.open_stream()

    def give(
        self,
        make_plan: MakePlan,
        reduction: Reduction | None,
        header: HeaderFields,
        timeout_ns: int,
        recorded: Recorded,
    ) -> Flight | Failure:
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
                    flight = Flight(header, self.stream.mark(), started, deadline, recorded)
            except (AbsentError, NcclTimeoutError, NcclError, SharedGpuError, RuntimeError) as error:
                failure = self._break(self._failure_of(error, header, started))
                recorded.end(failure.code)
                return failure
            self._flights.append(flight)
        return flight

    def _failure_of(self, error: Exception, header: HeaderFields, started: float) -> Failure:
        """Returns why a call could not be enqueued; a RuntimeError is one of CUDA or of the store."""
        if isinstance(error, AbsentError):
            return self._timed_out(started, error.missing)
        if isinstance(error, NcclTimeoutError):
            return self._timed_out(started, self._progress.missing(header))
        return Failure(Code.REFUSED, said=f"{error}. {_ADVICE}" if isinstance(error, NcclError) else str(error))

    def _enqueue(
        self,
        communicator: Communicator,
        make_plan: MakePlan,
        reduction: Reduction | None,
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
                self._flights.popleft().recorded.end(Code.OK)
        except RuntimeError as error:  # from CUDA; the program will see it as well
            self.failure = Failure(Code.REFUSED, said=str(error))
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

    def _trouble(self, oldest: Flight) -> Failure | None:
        communicator, peers = self._communicator, self._peers
        assert communicator is not None and peers is not None
        gone = peers.gone()
        now = time.monotonic()
        if gone and self._peer_gone_since is None:
            self._peer_gone_since = now
        if self._peer_gone_since is not None and now - self._peer_gone_since > _ARRIVING_S:
            return Failure(Code.PEER_LOST, gone=self._group_ranks(gone))
        said = communicator.error()
        if said is not None:
            return Failure(Code.REFUSED, said=f"while the call was under way: {said}. {_ADVICE}")
        if now > oldest.deadline:
            return self._timed_out(oldest.started, self._progress.missing(oldest.header))
        return None

    def _timed_out(self, started: float, missing: Sequence[int]) -> Failure:
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
            return Failure(Code.MISMATCH, reporter=here, calls=by_group_rank, algorithms=[0] * len(by_group_rank))
        if not missing:
            return Failure(
                Code.REFUSED,
                said=f"all ranks have made this call, and it was not over after {waited_s:.1f} s: either it needs "
                f"longer than the time-out (raise timeout=), or the GPUs do not reach each other. {_ADVICE}",
            )
        return Failure(
            Code.TIMED_OUT, missing=self._group_ranks(missing), waited_ns=int(waited_s * 1e9), calls=by_group_rank
        )

    def _break(self, failure: Failure) -> Failure:
        if self.failure is None:
            self.failure = failure
            for flight in self._flights:
                flight.recorded.end(failure.code)
            if self._communicator is not None:
                self._communicator.abort()
        return self.failure

    def _open(self, deadline: float) -> Communicator:
        ends, functions = self._ends, self._library.functions
        mine = Presence.here(self._device.identity, str(self._device))
        met = meet(
            PrefixStore("meet", self._store), ends.members, ends.at, mine, functions.new_id, deadline, self._stopped
        )
        self._peers = Peers(met.presences, ends.at)
        return Communicator(functions, met.unique_id, ends.at, len(ends.members), deadline, self._stopped)

    def _stopped(self) -> bool:
        return self._leaving or self._engine_closes()

    def _group_ranks(self, places: Sequence[int]) -> list[int]:
        return [self._ends.group_ranks[place] for place in places]

    def abort(self) -> None:
        """Ends the calls on the stream and accepts no more; the other ranks' calls end with their time-out."""
        self._leaving = True
        with self._lock, self._device.activated():
            self._break(Failure(Code.ABORTED))

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
