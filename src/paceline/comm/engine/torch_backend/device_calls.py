"""`CallStream`: a process group on a device, opened by its first call, and the stream on which its calls run.

The program's streams wait for calls, but its threads do not. `CallWatch` therefore runs a thread that watches the calls
in progress and aborts those that cannot complete. `DeviceWork` is a call that the program can wait for.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.engine.adapters.device_streams import (
    AcceleratorEvent,
    AcceleratorStream,
    current_stream,
    is_capturing,
    poll_until,
    polled,
    record_current,
)
from paceline.comm.engine.adapters.group_recorder import RecordedWork
from paceline.comm.engine.adapters.library_engine import exit_of
from paceline.comm.engine.channel import CallFailure, HeaderFields, OutcomeCode, dtype_name
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.torch_backend.collectives import StartedCall, TorchGroup
from paceline.comm.engine.torch_backend.peers import (
    AbsentError,
    DevicePeer,
    PeerWatch,
    RankProgress,
    SharedGpuError,
    exchange_peers,
)
from paceline.comm.engine.torch_backend.process_groups import OwnedProcessGroup, TorchStore, run_bounded
from paceline.comm.store.store import PrefixStore, Store

ConstructGroup = Callable[[TorchStore, int, int], OwnedProcessGroup]
"""A function that constructs a process group, given a store for its exclusive use, the rank and the number of ranks."""

StartCall = Callable[[TorchGroup], StartedCall]
"""A function that starts a process-group call on the current stream."""

_CLOSED = CallFailure(OutcomeCode.REFUSED, detail="the group was closed meanwhile (destroy_process_group)")
# How long to wait for a call after a rank has exited. The call can still complete if the rank finished its part first.
_GRACE_S = 1.0
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)
_POLLING_S = 0.01


@dataclass
class CallInFlight:
    """A call that has been, or is being, enqueued on the stream; times are values of `time.monotonic`.

    Attributes:
        header: the call as described in failure reports.
        started, deadline: the time at which the program made the call, and the time by which it must complete.
        recorded: the call's entry in the recording.
        event: the event recorded on the stream after the call; None until the call is on the stream.
        program_stream: the stream that was current when the call was enqueued; None on the CPU.
        is_captured: whether the call was captured into a graph, in which case its completion cannot be observed.
        failure: the reason why the call failed; None while the call runs and after it succeeded.
    """

    header: HeaderFields
    started: float
    deadline: float
    recorded: RecordedWork
    event: AcceleratorEvent | None = None
    program_stream: Any = None
    is_captured: bool = False
    failure: CallFailure | None = None


@dataclass(frozen=True)
class StreamRanks:
    """The ranks that a call stream connects, in the order of their ranks in its process group.

    Attributes:
        members: the ranks with their hosts and processes.
        group_ranks: the group ranks of `members`, for failure reports.
        index: the index of this rank in `members`.
        are_pair: whether the ranks are the sender and the receiver of messages, rather than participants in
            collectives.
    """

    members: tuple[RankIdentity, ...]
    group_ranks: tuple[int, ...]
    index: int
    are_pair: bool = False


@dataclass(frozen=True)
class StreamSettings:
    """The settings that all call streams of an engine share.

    Attributes:
        library: the library's name, for error messages.
        advice: a sentence, without a period, about how to investigate an error reported by the library.
        identify: a function that returns a device's identifier, which is valid across processes, or "" if processes can
            share the device.
        store: the store in which ranks report how they exited.
        is_closing: a function that returns True if the engine is being closed.
    """

    construct: ConstructGroup
    library: str
    advice: str
    identify: Callable[[torch.device], str]
    store: Store
    is_closing: Callable[[], bool] = field(default=lambda: False)


class CallStream:
    """Runs calls sequentially; any thread may use it.

    Args:
        store: a store for the exclusive use of this call stream.
        greet: a function that starts the first call, in which the library connects the ranks.
    """

    def __init__(
        self, settings: StreamSettings, device: torch.device, store: Store, ranks: StreamRanks, greet: StartCall
    ) -> None:
        self._settings = settings
        self._store = store
        self._ranks = ranks
        self._greet = greet
        self._progress = RankProgress(PrefixStore("at", store), ranks.index, len(ranks.members))
        self._group: OwnedProcessGroup | None = None
        self._peers: PeerWatch | None = None
        self._peer_gone_since: float | None = None
        self._error_since: float | None = None
        self._turn = threading.Lock()  # held while a call is enqueued on the stream
        self._breaking = threading.Lock()
        self._flights: deque[CallInFlight] = deque()
        self._entering: CallInFlight | None = None
        self._sequence = 0
        self._leaving = False
        self._closed = False
        self.failure: CallFailure | None = None  # once set, it is permanent
        self.stream = AcceleratorStream(device)

    @property
    def size(self) -> int:
        """The number of ranks that the call stream connects."""
        return len(self._ranks.members)

    def enqueue(
        self,
        start: StartCall,
        header: HeaderFields,
        timeout_ns: int,
        recorded: RecordedWork,
        after: AcceleratorEvent | None = None,
    ) -> DeviceWork:
        """Enqueues a call on the stream. The first call opens the process group, which waits for the other ranks.

        Args:
            header: the call as described in failure reports; its sequence number is set here.
            timeout_ns: the time after which the call is aborted, in nanoseconds.
            after: the position after which the call runs. The default is the position after the work enqueued so far on
                the current stream.

        Raises:
            RuntimeError: the current stream is being captured, and this is the first call on the group.
            TypeError, ValueError: PyTorch rejects the arguments; raised on all ranks.
        """
        started = time.monotonic()
        flight = CallInFlight(header, started, started + timeout_ns / 1e9, recorded)
        with self._turn:
            flight.failure = self.failure or (_CLOSED if self._leaving else None)
            if flight.failure is not None:
                recorded.end(flight.failure.code)
                return DeviceWork(flight, self)
            flight.is_captured = is_capturing(self.stream.device)
            if flight.is_captured and self._group is None:
                recorded.end(OutcomeCode.REFUSED)
                raise RuntimeError(
                    f"the first call of a group on {self.stream.device} connects its ranks, which cannot be captured "
                    "into a graph: make one such call before the capture"
                )
            self._sequence += 1
            flight.header = (self._sequence, *header[1:])
            self._progress.arrive(flight.header)
            try:
                self._put(flight, start, after)
            except (TypeError, ValueError):
                recorded.end(OutcomeCode.REFUSED)
                raise
            except Exception as error:  # from the library, the device or the store; the other ranks stop waiting
                self._break(self._failure_of(error, flight), flight)
            finally:
                self._entering = None
            if flight.failure is None and flight.is_captured:
                recorded.end(OutcomeCode.OK)
            elif flight.failure is None:
                self._flights.append(flight)
        if self.failure is not None and flight in self._flights:
            self._break(self.failure, flight)  # another thread broke the stream in the meantime
        return DeviceWork(flight, self)

    def _put(self, flight: CallInFlight, start: StartCall, after: AcceleratorEvent | None) -> None:
        if self._group is None:
            self._open(flight)
        assert self._group is not None
        self._entering = flight
        device = self.stream.device
        is_timed = not flight.is_captured and device.type != "cpu"
        current = None if device.type == "cpu" else current_stream(device)
        reached = record_current(device, timing=is_timed, current=current) if after is None else after
        self.stream.follow(reached)
        with self.stream.current(current):
            call = start(self._group.group)
            if not is_timed:
                flight.recorded.start()
            if call.work is not None:
                call.work.wait()  # makes this stream wait, but not the thread
            for result in call.written:
                result.copy_out()
            flight.event = self.stream.record(timing=is_timed)
        flight.program_stream = current
        if is_timed:
            flight.recorded.follow(device, reached, flight.event)

    def _open(self, flight: CallInFlight) -> None:
        """Connects the ranks on another thread, since the library may wait for a rank that will never arrive."""
        ranks, device = self._ranks, self.stream.device
        mine = DevicePeer.here(self._settings.identify(device), str(device))
        peers = exchange_peers(
            PrefixStore("peers", self._store), ranks.members, ranks.index, mine, flight.deadline, self._stopped
        )
        self._peers = PeerWatch(peers, ranks.index, self._has_exited)
        self._entering = flight
        store = TorchStore(self._store, "group/", flight.deadline)
        made: list[OwnedProcessGroup] = []

        def connect() -> None:
            with self.stream.current():
                made.append(self._settings.construct(store, ranks.index, len(ranks.members)))
                made[0].device = device
                work = self._greet(made[0].group).work
                if work is not None:
                    work.wait()

        if not run_bounded(connect, flight.deadline, "connect", lambda: self._stopped() or self.failure is not None):
            for group in made:
                group.abort()
            raise AbsentError(self._progress.missing(flight.header))
        store.deadline = None
        self._group = made[0]

    def _has_exited(self, index: int) -> bool:
        return exit_of(self._settings.store, self._ranks.members[index]) is not None

    def _failure_of(self, error: Exception, flight: CallInFlight) -> CallFailure:
        """Returns the reason why a call could not be enqueued on the stream."""
        if self._stopped():
            return _CLOSED
        if isinstance(error, AbsentError):
            return self._timed_out(flight.started, error.missing)
        if isinstance(error, SharedGpuError):
            return CallFailure(OutcomeCode.REFUSED, detail=str(error))
        if (different := self._difference(at_once=True)) is not None:
            return different  # the reason why another rank has aborted its process group
        until = time.monotonic() + _GRACE_S  # a dying rank's connection breaks before its process exits
        while self._peers is not None and time.monotonic() < until:
            if gone := self._peers.gone():
                return CallFailure(OutcomeCode.PEER_LOST, gone=self._group_ranks(gone))
            time.sleep(_POLLING_S)
        return CallFailure(OutcomeCode.REFUSED, detail=f"{_first_line(error)}. {self._settings.advice}")

    def look(self) -> bool:
        """Drops completed calls and breaks the stream if a call cannot complete; returns whether to poll again.

        Only a thread that does nothing else may call this; see `device_streams.polled`.
        """
        try:
            with polled(self.stream.device):
                return self._look()
        except RuntimeError as error:  # a device error, which the program also receives
            self._break_on_device(error)
            return False

    def _look(self) -> bool:
        if self.failure is not None:
            return False
        completed = self._completed()
        with self._breaking:
            for _ in range(min(completed, len(self._flights))):
                self._flights.popleft().recorded.end(OutcomeCode.OK)
        self._progress.publish()
        if (failure := self._difference()) is not None:
            self._break(failure)
            return False
        oldest = self._flights[0] if self._flights else self._entering
        if oldest is None:
            return not self._progress.is_compared
        failure = self._find_failure(oldest)
        if failure is None:
            return True
        self._break(failure)
        return False

    def _completed(self) -> int:
        """Returns the number of completed calls. Calls complete in order, so only a few of them are polled."""
        flights = tuple(self._flights)
        return bisect.bisect_left(range(len(flights)), True, key=lambda index: not _has_passed(flights[index]))

    def _difference(self, at_once: bool = False) -> CallFailure | None:
        """Returns the failure if this rank's calls differ from the next rank's. NCCL may not detect such a difference.

        Every rank performs this comparison, which detects a difference even after the calls have completed.
        """
        calls = self._progress.difference(at_once)
        if not calls:
            return None
        if not self._ranks.are_pair:
            return self._mismatch([calls.get(index, _NO_CALL) for index in range(len(self._ranks.members))])
        sender, receiver = self._ranks.members
        sent, received = (
            f"{nbytes} bytes of {dtype_name(dtype)} and tag {tag}"
            for _, _, dtype, _, tag, nbytes in (calls[0], calls[1])
        )
        return CallFailure(
            OutcomeCode.REFUSED,
            detail=f"message {calls[0][0]} from {sender} to {receiver} is sent with {sent}, and received with "
            f"{received}. {self._settings.library} has no tags: receive the messages from a rank in the order in which "
            "it sends them",
        )

    def _mismatch(self, calls: Sequence[HeaderFields]) -> CallFailure:
        """Returns the failure for mismatched calls, given each rank's call by index."""
        by_group_rank = self._by_group_rank(calls)
        me = self._ranks.group_ranks[self._ranks.index]
        return CallFailure(OutcomeCode.MISMATCH, reporter=me, calls=by_group_rank, algorithms=[0] * len(by_group_rank))

    def _by_group_rank(self, calls: Sequence[HeaderFields]) -> list[HeaderFields]:
        by_group_rank = [_NO_CALL] * (1 + max(self._ranks.group_ranks))
        for group_rank, call in zip(self._ranks.group_ranks, calls, strict=True):
            by_group_rank[group_rank] = call
        return by_group_rank

    def _find_failure(self, oldest: CallInFlight) -> CallFailure | None:
        if self._peers is None:
            return None
        gone = self._peers.gone()
        now = time.monotonic()
        if gone and self._peer_gone_since is None:
            self._peer_gone_since = now
        if self._peer_gone_since is not None and now - self._peer_gone_since > _GRACE_S:
            return CallFailure(OutcomeCode.PEER_LOST, gone=self._group_ranks(gone))
        detail = None if gone or self._group is None else self._group.error()
        if detail is not None and self._error_since is None:
            self._error_since = now  # a dying rank's connection breaks before its process exits
        if detail is not None and self._error_since is not None and now - self._error_since > _GRACE_S:
            return self._difference(at_once=True) or CallFailure(
                OutcomeCode.REFUSED,
                detail=f"while the call was running, {self._settings.library} reported {detail}. "
                f"{self._settings.advice}",
            )
        if now > oldest.deadline:
            return self._timed_out(oldest.started, self._progress.missing(oldest.header))
        return None

    def _timed_out(self, started: float, missing: Sequence[int]) -> CallFailure:
        waited_s = time.monotonic() - started
        if (different := self._difference(at_once=True)) is not None:
            return different
        calls = self._progress.latest()
        mine = calls[self._ranks.index]
        if not self._ranks.are_pair and any(call[0] == mine[0] and call != mine for call in calls):
            return self._mismatch(calls)
        if not missing:
            return CallFailure(
                OutcomeCode.REFUSED,
                detail=f"all ranks made this call, but it had not completed after {waited_s:.1f} s: either it needs "
                "more time than the timeout allows (raise timeout=), or the devices cannot reach each other. "
                f"{self._settings.advice}",
            )
        return CallFailure(
            OutcomeCode.TIMED_OUT,
            missing=self._group_ranks(missing),
            waited_ns=int(waited_s * 1e9),
            calls=() if self._ranks.are_pair else self._by_group_rank(calls),
        )

    def _break(self, failure: CallFailure, entering: CallInFlight | None = None) -> None:
        """Fails `entering` and all calls in flight, and aborts the process group; any thread may call this.

        Only the first failure is kept.
        """
        with self._breaking:
            is_first = self.failure is None
            if self.failure is None:
                self.failure = failure
            # Failures are set before the abort, because the abort also completes the calls on the stream.
            flights = [*self._flights, *(flight for flight in (entering, self._entering) if flight is not None)]
            for flight in flights:
                if flight.failure is None and not _is_complete(flight):
                    flight.failure = self.failure
                    flight.recorded.end(self.failure.code)
            self._flights.clear()
        if is_first and self._group is not None:
            self._group.abort()

    def _break_on_device(self, error: RuntimeError) -> None:
        self._break(CallFailure(OutcomeCode.REFUSED, detail=_first_line(error)))

    def _stopped(self) -> bool:
        return self._leaving or self._settings.is_closing()

    def _group_ranks(self, indices: Sequence[int]) -> list[int]:
        return [self._ranks.group_ranks[index] for index in indices]

    def abort(self) -> None:
        """Aborts the calls on the stream and rejects later ones; calls on the other ranks fail when they time out."""
        self._break(CallFailure(OutcomeCode.ABORTED))

    def leave(self) -> None:
        """Rejects later calls and aborts a call that is waiting for other ranks to connect; idempotent."""
        self._leaving = True

    def drain(self) -> None:
        """Waits until every call has completed or failed. (A call fails if it times out or a rank dies.)

        The watch must still be running. Failed calls cause a warning, because their results are undefined.
        """
        self.leave()
        in_flight = len(self._flights)
        while self._flights and self.failure is None:
            try:
                if _has_passed(self._flights[-1]):
                    break
            except RuntimeError as error:  # a device error, which must not prevent the shutdown of other groups
                self._break_on_device(error)
            except IndexError:  # the watch has dropped the last call
                break
            time.sleep(_POLLING_S)
        if in_flight and self.failure is not None and self.failure is not _CLOSED:
            warnings.warn(
                f"{self._ranks.members[self._ranks.index]}: destroy_process_group aborted up to {in_flight} incomplete "
                f"calls on {self.stream.device}, so their tensors are undefined: "
                f"{self.failure.code.name}{': ' if self.failure.detail else ''}{self.failure.detail}",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self, deadline: float) -> None:
        """Shuts down the process group, waiting for the other ranks until `deadline`; idempotent.

        The deadline is a value of `time.monotonic`. All streams of an engine are closed concurrently, each on its own
        thread, since another rank may close them in a different order.
        """
        with self._breaking:
            if self._closed:
                return
            self._closed = True
            if self.failure is None:
                self.failure = _CLOSED
        if self._group is not None:
            peers = self._peers
            if not self._group.shut_down(deadline, lambda: bool(peers is not None and peers.gone())):
                logging.getLogger(__name__).info(
                    "the process group on %s was aborted after its last call", self.stream.device
                )

    def forget_peers(self) -> None:
        """Stops watching the other ranks; the watch must already be closed. Idempotent."""
        if self._peers is not None:
            self._peers.close()


def _has_passed(flight: CallInFlight) -> bool:
    return flight.event is not None and flight.event.done()


def _is_complete(flight: CallInFlight) -> bool:
    try:
        return _has_passed(flight)
    except RuntimeError:  # a device error
        return False


def _first_line(error: Exception) -> str:
    """Returns an error's message without the C++ stack trace that PyTorch may append to it."""
    text = str(error).partition("\nException raised from")[0]
    return " ".join(text.split())


_WATCH_INTERVAL_S = 0.05
_POOLED_STREAMS = 32  # PyTorch returns the streams of a device and priority in rotation


class CallWatch:
    """Polls call streams whenever one of them has a call in progress; runs until `close` is called."""

    def __init__(self) -> None:
        self._streams: list[CallStream] = []
        self._called = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-call-watch", daemon=True)
        self._thread.start()

    def add(self, calls: CallStream) -> None:
        """Starts watching `calls`. Warns if its device now has more call streams than PyTorch has streams."""
        self._streams = [*self._streams, calls]
        device = calls.stream.device
        if sum(stream.stream.device == device for stream in self._streams) == _POOLED_STREAMS + 1:
            logging.getLogger(__name__).warning(
                "more than %s groups and directions of messages are open on %s, which is the number of streams that "
                "PyTorch provides. Calls in groups that share a stream wait for each other, and can time out if ranks "
                "make them in different orders: destroy groups that are not needed, or create fewer",
                _POOLED_STREAMS,
                device,
            )

    def remove(self, calls: CallStream) -> None:
        """Stops watching `calls`."""
        self._streams = [stream for stream in self._streams if stream is not calls]

    def wake(self) -> None:
        """Wakes the thread for a new call."""
        if not self._called.is_set():  # cheaper than `set`
            self._called.set()

    def close(self) -> None:
        """Stops the thread; idempotent."""
        self._closing.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        failing = set[int]()  # the ids of streams whose errors have been logged
        while True:
            self._called.wait()
            self._called.clear()  # cleared before the pause, since `close` may be called at any time
            if self._closing.wait(_WATCH_INTERVAL_S):
                return
            for calls in self._streams:
                try:
                    if calls.look():
                        self._called.set()
                    failing.discard(id(calls))
                except Exception:  # the thread must continue, because it enforces all timeouts
                    if id(calls) not in failing:
                        logging.getLogger(__name__).exception("a group's calls could not be checked; retrying")
                    failing.add(id(calls))
                    self._called.set()


# A timeout of at least this length is treated as no timeout: only the program's stream waits for the call, not the
# program's thread.
_NO_LIMIT_NS = 1 << 61


class DeviceWork:
    """A call that was enqueued on `calls`, or that failed before it was enqueued; see `channel.StreamCall`."""

    def __init__(self, flight: CallInFlight, calls: CallStream) -> None:
        self._flight = flight
        self._calls = calls

    def done(self) -> bool:
        """Returns True if the call is complete, successfully or not."""
        flight = self._flight
        return flight.failure is not None or flight.is_captured or flight.event is None or flight.event.done()

    def is_enqueued(self) -> bool:
        """Returns True, because `wait` blocks only the current stream."""
        return True

    def wait(self, timeout_ns: int) -> bool:
        """Makes the current stream and, with a timeout, also the thread wait for the call; returns False on timeout."""
        if timeout_ns < _NO_LIMIT_NS and not self.finish(timeout_ns):
            return False
        self.order()
        return True

    def order(self) -> None:
        """Makes the current stream wait for the call."""
        if self._flight.event is not None:
            self._flight.event.order()

    def order_program(self) -> None:
        """Makes the program's stream (the one that was current when the call was enqueued) wait for the call."""
        if self._flight.event is not None:
            self._flight.event.order(self._flight.program_stream)

    def finish(self, timeout_ns: int) -> bool:
        """Makes the thread wait for the call; returns False on timeout."""
        return poll_until(self.done, timeout_ns)

    def outcome(self) -> CallFailure | None:
        """Returns the reason why the call failed, or None if no failure has been detected so far."""
        return self._flight.failure
