"""The live page of a job, as its launcher knows it: it opens the page, tells it what happens, and closes it.

What a launcher without the live page sees of its ranks for the one that has it, while somebody looks at the page.
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
from paceline.operate.dashboard.event_queue import Note, RemoteSample
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
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.dashboard_link import LocalActivity
from paceline.operate.launch.job import Job
from paceline.operate.launch.multinode.protocol import AskStacks, DashboardUpdate, DashboardWatched, UserMessage

_SAMPLE_INTERVAL_S = 1.0
_MOST_LINES = 500  # that are sent at once
_MOST_CHARACTERS = 1 << 18

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RemoteSample).decode


class RemoteDashboardFeed:
    """Looks at the workers of this machine each second until `close`.

    Args:
        local: what this launcher has noted.
        workers: returns those that run.
        offset_s: returns what is to be added to this machine's clock to get that of the page's.
        send: is called with what is seen.
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
        self._lookout = LocalCollector(local.notes, JobInfo(""))
        self.deadline_s = 0.0
        local.hear(True)

    def tick(self, now_s: float) -> None:
        """Looks and sends what it sees, if that is due."""
        if now_s >= self.deadline_s:
            self.deadline_s = now_s + _SAMPLE_INTERVAL_S
            self.look()

    def look(self) -> None:
        """Looks and sends what it sees."""
        self._local.watch(self._workers())
        sample = self._lookout.look()
        if sample.ranks or sample.lines or sample.events:
            self._send(DashboardUpdate(encode_update(sample, self._offset_s())))

    def close(self) -> None:
        """Releases the recordings; idempotent."""
        self._local.hear(False)
        self._local.forget_workers()
        self._lookout.close()


def encode_update(sample: JobSample, offset_s: float) -> str:
    """Returns a sample as JSON, with its times on the page's clock, in about 2 KB a rank and second.

    Only the last step of a rank keeps its phases and buckets, since the page shows one step of them. Where there is
    much output, the latest is sent.
    """
    told = RemoteSample(
        ranks=tuple(_rank(each, offset_s) for each in sample.ranks),
        links=sample.links,
        events=tuple(_at(each, offset_s) for each in sample.events),
        lines=tuple(_at(each, offset_s) for each in _latest(sample.lines)),
        stacks=tuple(_at(each, offset_s) for each in sample.stacks),
    )
    return _encode(told).decode()


def decode_update(body: str) -> RemoteSample:
    """Returns what another machine has seen.

    Raises:
        ValueError: `body` is something else.
    """
    return decode_untrusted(_decode, body)


def _latest(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    kept: list[Line] = []
    characters = 0
    for line in reversed(lines[-_MOST_LINES:]):
        characters += len(line.text)
        if characters > _MOST_CHARACTERS:
            break
        kept.append(line)
    left_out = len(lines) - len(kept)
    if left_out:
        first = lines[0]
        kept.append(Line(first.at_s, first.rank, 2, f"({left_out} lines of this machine's ranks are left out here)"))
    return tuple(reversed(kept))


_Moment = TypeVar("_Moment", JobEvent, Line, Stack)


def _at(moment: _Moment, offset_s: float) -> _Moment:
    return replace(moment, at_s=moment.at_s + offset_s)


def _rank(sample: RankSample, offset_s: float) -> RankSample:
    last = len(sample.steps) - 1
    steps = tuple(_step(each, offset_s, at == last) for at, each in enumerate(sample.steps))
    return replace(sample, heard_s=sample.heard_s + offset_s, steps=steps)


def _step(step: RankStep, offset_s: float, is_last: bool) -> RankStep:
    def at(time_s: float) -> float:
        return round(time_s + offset_s, 6)

    phases = tuple((name, at(begin), at(end)) for name, begin, end in step.phases) if is_last else ()
    buckets = tuple(BucketTiming(at(b.ready_s), at(b.sent_s), at(b.done_s), b.nbytes, b.name) for b in step.buckets)
    times = {name: round(value, 6) for name, value in vars(step).items() if name.endswith("_s") and value is not None}
    times |= {"begin_s": at(step.begin_s), "end_s": at(step.end_s)}
    return replace(step, **times, phases=phases, buckets=buckets if is_last else ())


_POLL_INTERVAL_S = 0.5  # between two looks at which workers run


class JobDashboard:
    """The page of a job.

    Args:
        job: the job, whose options say where the page is.
        security: how the job's connections are protected.
        directory: the job's, where `paceline top` finds the page's address; None if there is none.
        say: tells the user a line.
        send: tells the launchers of other machines whether somebody looks, or asks them for their stacks.

    Raises:
        AddressError: it cannot listen where it was told to.
        MissingDashError: the packages that it needs are not installed.
    """

    def __init__(
        self,
        job: Job,
        security: str,
        directory: Path | None,
        say: Callable[[str], None],
        send: Callable[[DashboardWatched | AskStacks], None],
    ) -> None:
        options = job.page
        assert options is not None
        self.local = LocalActivity()
        self._next_s = 0.0
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
        lookout = LocalCollector(self.local.notes, self._facts)
        token = new_token()
        access = Access(token, name_of(job.run_id), frozenset(options.hosts), options.acts)
        listener = ListenAddress(options.port, options.socket).listen()
        told = lines(listener, token, options.prefix)
        try:
            self._serving = DashboardServer(
                listener, lookout.look, access, options.prefix, {"stacks": self._take_stacks}, say
            )
        except BaseException:
            listener.close()
            raise
        self._lookout = lookout
        self._file = directory / ADDRESS_FILE if directory is not None else None
        if self._file is not None:
            write_address(self._file, listener, token, options.prefix)
        for line in told:
            say(line)

    def note(self, note: Note) -> None:
        """Leaves a note, such as a verdict."""
        self.local.notes.leave(note)

    def seen(self, body: str) -> None:
        """Notes what another machine sees of its ranks, and what they print."""
        try:
            self.note(decode_update(body))
        except ValueError:  # of another version
            return

    def stalled(self, told: UserMessage) -> None:
        """Notes why the job does not get on, or that it does so again."""
        self.note(StallNotice(told.text, told.blamed, (), time.monotonic()) if told.is_stall else None)

    def generation(self, world_size: int, restarts: int) -> None:
        """Notes that workers are started, as so many ranks, after so many restarts."""
        self._facts = replace(self._facts, world_size=world_size, restarts=restarts)
        self.note(self._facts)

    @property
    def deadline_s(self) -> float:
        """When (monotonic) `watch` is to be called next."""
        return self._next_s

    def watch(self, now_s: float, workers: Callable[[], Iterable[WatchedWorker]]) -> None:
        """Notes which workers have begun and which have ended, if that is due."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _POLL_INTERVAL_S
        if self._has_others and self._serving.is_watched != self._was_watched:
            self._was_watched = self._serving.is_watched
            self._send(DashboardWatched(self._was_watched))
        if self._is_asking:
            self._is_asking = False
            self._send(AskStacks())
        self.local.watch(workers())

    def _take_stacks(self) -> str:
        """Takes the stacks of the workers that run; called in a thread of the page's."""
        self._is_asking = self._has_others
        count = self.local.take_stacks()
        more = " and asked the other machines for theirs" if self._has_others else ""
        return f"took the stacks of {count} workers of this machine{more}"

    def over(self, outcome: str) -> None:
        """Notes how the job has ended: "finished", "failed" or "stopped"."""
        self.note(replace(self._facts, outcome=outcome))

    def close(self) -> None:
        """Ends the page; idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._serving.close()
        self._lookout.close()
        self.local.close()
