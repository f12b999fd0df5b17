"""A job's dashboard in the launcher, and the feed from launchers on other machines.

Launchers import this module only if the job has a dashboard. A feed runs only while a browser shows the dashboard.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.operate.dashboard.access import Access, name_of, new_token
from paceline.operate.dashboard.event_queue import RemoteSample
from paceline.operate.dashboard.job_sample import (
    BucketTiming,
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    RankSample,
    RankStep,
    Stack,
    StallNotice,
)
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.dashboard.server import ADDRESS_FILE, DashboardServer, ListenAddress, lines, write_address
from paceline.operate.diagnosis.job_snapshot import RankState
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.job import Job
from paceline.operate.launch.local_activity import LocalActivity
from paceline.operate.launch.multinode.protocol import DashboardUpdate, DashboardWatched, StacksRequest, UserMessage

_SAMPLE_INTERVAL_S = 1.0
_MOST_LINES = 500  # maximum number of output lines in one update
_MOST_CHARACTERS = 1 << 18

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RemoteSample).decode
_POLL_INTERVAL_S = 0.5  # interval between checks for started and exited workers


class JobDashboard:
    """The dashboard of a job.

    `paceline top` finds the dashboard's address in `directory`, the job's directory. `send` sends a message to all
    launchers.

    Raises:
        AddressError: the dashboard cannot listen on the given address.
        MissingDashError: required packages are not installed.
    """

    def __init__(
        self,
        job: Job,
        security: str,
        directory: Path | None,
        print_line: Callable[[str], None],
        send: Callable[[DashboardWatched | StacksRequest], None],
        local: LocalActivity,
        workers: Callable[[], Iterable[WatchedWorker]],
    ) -> None:
        options = job.page
        assert options is not None
        self._local = local
        self._workers = workers
        self.deadline_s = 0.0  # time (monotonic) at which `tick` must be called
        self._send = send
        self._has_others = job.rendezvous.address is not None
        self._was_watched = False
        self._is_asking = False
        self._facts = JobInfo(
            run_id=job.run_id,
            command=shlex.join(["paceline", "run", *job.command.argv]),
            started_s=time.monotonic(),
            security=security,
            is_elastic=job.elastic is not None,
        )
        collector = LocalCollector(self._local.notes, self._facts)
        token = new_token()
        access = Access(token, name_of(job.run_id), frozenset(options.hosts), options.acts)
        listener = ListenAddress(options.port, options.socket).listen()
        greeting = lines(listener, token, options.prefix)
        try:
            self._serving = DashboardServer(
                listener, collector.look, access, options.prefix, {"stacks": self._take_stacks}, print_line
            )
        except BaseException:
            listener.close()
            raise
        self._collector = collector
        self._file = directory / ADDRESS_FILE if directory is not None else None
        if self._file is not None:
            write_address(self._file, listener, token, options.prefix)
        for line in greeting:
            print_line(line)

    def seen(self, body: str) -> None:
        """Displays an update from another machine."""
        with contextlib.suppress(ValueError):  # the update may be from a different version
            self._local.notes.leave(decode_update(body))

    def stalled(self, message: UserMessage) -> None:
        """Displays the cause of a stall or failure, or a notice that the job has resumed."""
        has_cause = message.is_stall or message.is_failure
        notice = StallNotice(message.text, message.blamed, (), time.monotonic(), message.is_failure)
        self._local.notes.leave(notice if has_cause else None)

    def generation(self, world_size: int, restarts: int) -> None:
        """Displays the start of workers, with the number of ranks and the number of restarts so far."""
        self._facts = replace(self._facts, world_size=world_size, restarts=restarts)
        self._local.notes.leave(self._facts)

    def tick(self, now_s: float) -> None:
        """If a check is due, records which workers have started or exited, and sends pending messages."""
        if now_s < self.deadline_s:
            return
        self.deadline_s = now_s + _POLL_INTERVAL_S
        if self._has_others and self._serving.is_watched != self._was_watched:
            self._was_watched = self._serving.is_watched
            self._send(DashboardWatched(self._was_watched))
        if self._is_asking:
            self._is_asking = False
            self._send(StacksRequest())
        self.sample()

    def sample(self) -> None:
        """Records which workers have started or exited."""
        self._local.watch(self._workers())

    def _take_stacks(self) -> str:
        """Captures the stacks of running workers. Called on a dashboard thread."""
        self._is_asking = self._has_others
        count = self._local.take_stacks()
        more = " and requested those of the other machines" if self._has_others else ""
        return f"captured the stacks of {count} workers on this machine{more}"

    def over(self, outcome: str) -> None:
        """Displays the job's outcome: "finished", "failed" or "stopped"."""
        self._local.notes.leave(replace(self._facts, outcome=outcome))

    def close(self) -> None:
        """Closes the dashboard; idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._serving.close()
        self._collector.close()


class RemoteDashboardFeed:
    """Samples this machine's workers every second until `close` is called.

    `offset_s` returns the offset from this machine's clock to the clock on the dashboard's machine, in seconds.
    """

    def __init__(
        self,
        local: LocalActivity,
        workers: Callable[[], Iterable[WatchedWorker]],
        offset_s: Callable[[], float],
        send: Callable[[DashboardUpdate], None],
    ) -> None:
        self._local = local
        self._workers = workers
        self._offset_s = offset_s
        self._send = send
        self._collector = LocalCollector(local.notes, JobInfo(""))
        self.deadline_s = 0.0
        local.set_observed(True)

    def tick(self, now_s: float) -> None:
        """Sends a sample if one is due."""
        if now_s >= self.deadline_s:
            self.deadline_s = now_s + _SAMPLE_INTERVAL_S
            self.sample()

    def sample(self) -> None:
        """Samples the workers and sends the sample unless it is empty."""
        self._local.watch(self._workers())
        sample = self._collector.look()
        if sample.ranks or sample.lines or sample.events:
            self._send(DashboardUpdate(encode_update(sample, self._offset_s())))

    def close(self) -> None:
        """Closes the recordings; idempotent."""
        self._local.set_observed(False)
        self._local.forget_workers()
        self._collector.close()


def encode_update(sample: JobSample, offset_s: float) -> str:
    """Encodes a sample as JSON, with times on the dashboard's clock. The size is about 2 KB per rank per second.

    Phases and buckets are included only for each rank's latest step, because the dashboard shows them for one step. If
    there is too much output, only the latest lines are sent.
    """
    update = RemoteSample(
        ranks=tuple(_rank(rank, offset_s) for rank in sample.ranks),
        links=sample.links,
        events=tuple(_shifted(event, offset_s) for event in sample.events),
        lines=tuple(_shifted(line, offset_s) for line in _latest(sample.lines)),
        stacks=tuple(_shifted(stack, offset_s) for stack in sample.stacks),
    )
    return _encode(update).decode()


def decode_update(body: str) -> RemoteSample:
    """Decodes a sample from another machine; raises ValueError if `body` is not one."""
    return decode_untrusted(_decode, body)


def _latest(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    kept: list[Line] = []
    characters = 0
    for line in reversed(lines[-_MOST_LINES:]):
        characters += len(line.text)
        if characters > _MOST_CHARACTERS:
            break
        kept.append(line)
    if left_out := len(lines) - len(kept):
        first = lines[0]
        kept.append(Line(first.at_s, first.rank, 2, f"({left_out} lines of this machine's ranks are omitted here)"))
    return tuple(reversed(kept))


_Moment = TypeVar("_Moment", JobEvent, Line, Stack)


def _shifted(moment: _Moment, offset_s: float) -> _Moment:
    return replace(moment, at_s=moment.at_s + offset_s)


def _rank(sample: RankSample, offset_s: float) -> RankSample:
    last = len(sample.steps) - 1
    steps = tuple(_step(step, offset_s, index == last) for index, step in enumerate(sample.steps))
    pending = sample.pending
    if pending is not None:
        calls = tuple(replace(call, arrived_s=call.arrived_s + offset_s) for call in pending.calls)
        pending = RankState(pending.rank, memberships=pending.memberships, calls=calls)
    return replace(sample, last_record_s=sample.last_record_s + offset_s, steps=steps, pending=pending)


def _step(step: RankStep, offset_s: float, is_last: bool) -> RankStep:
    def shift(time_s: float) -> float:
        return round(time_s + offset_s, 6)

    phases = tuple((name, shift(begin), shift(end)) for name, begin, end in step.phases) if is_last else ()
    buckets = tuple(
        BucketTiming(shift(bucket.ready_s), shift(bucket.sent_s), shift(bucket.done_s), bucket.nbytes, bucket.name)
        for bucket in (step.buckets if is_last else ())
    )
    times = {name: round(value, 6) for name, value in vars(step).items() if name.endswith("_s") and value is not None}
    times |= {"begin_s": shift(step.begin_s), "end_s": shift(step.end_s)}
    return replace(step, **times, phases=phases, buckets=buckets)
