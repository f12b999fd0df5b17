"""The workers of an elastic job that run on this machine, by slot."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.elastic import messages
from paceline.elastic.messages import FromWorker
from paceline.launch.elastic.channel import Channel
from paceline.launch.elastic.forking import Forker, Request
from paceline.launch.elastic.frozen import StopWatch, is_stopped
from paceline.launch.elastic.replacement import Life
from paceline.launch.following import Following
from paceline.launch.job import Job
from paceline.launch.nodes.messages import Start
from paceline.launch.start_workers import Prepared, Surroundings, prepare
from paceline.launch.worker import Worker

NAME = "PACELINE_WORKER"


@dataclass
class Member:
    """The worker of a slot: its name, its process once it has one, and what is known of its life."""

    uid: str
    slot: int  # of this machine's, from 0
    number: int  # of the slot in the whole job, which is the worker's RANK
    channel: Channel
    asked_s: float
    is_replacement: bool = False  # the slot had a worker before
    life: Life = field(default_factory=Life)
    worker: Worker | None = None
    following: Following | None = None

    def __str__(self) -> str:
        pid = f", pid {self.worker.pid}" if self.worker is not None else ""
        return f"slot {self.number} (worker {self.uid}{pid})"

    @property
    def runs(self) -> bool:
        """Whether it has a process whose end is not known yet."""
        return self.worker is not None and self.worker.exit_code is None

    def signal(self, number: int) -> None:
        """Sends a signal to the worker, if it runs."""
        if self.worker is not None and self.worker.exit_code is None:
            self.worker.signal(number)


class Crew:
    """Starts workers and follows them until they end.

    Args:
        job: says what to run.
        start: the ranks of this machine's slots.
        machine: this machine's number in the job, with which the workers' names begin.
        around: what the workers have in common.
        forker: starts their processes.
        selector: the launcher's loop.
        marks: returns the variables that mark what a worker of this name starts.
        on_start: is called with a worker that has a process now.
        on_message: is called with each message of a worker; None stands for one that is not a message.
        on_end: is called with a worker that has ended, after all of its messages and output.
    """

    def __init__(
        self,
        job: Job,
        start: Start,
        machine: int,
        around: Surroundings,
        forker: Forker,
        selector: selectors.BaseSelector,
        *,
        marks: Callable[[str], dict[str, str]],
        on_start: Callable[[Member], None],
        on_message: Callable[[Member, FromWorker | None, bytes], None],
        on_end: Callable[[Member, int], None],
    ) -> None:
        self.members: dict[int, Member] = {}
        self.stopped = StopWatch()
        self._job, self._start, self._machine, self._around = job, start, machine, around
        self._forker = forker
        self._selector = selector
        self._marks = marks
        self._on_start, self._on_message, self._on_end = on_start, on_message, on_end
        self._attempts: dict[int, int] = {}

    def add(self, slot: int) -> None:
        """Starts a worker in a slot that has none; it has a process when `on_start` is called.

        Raises:
            OSError: there are no descriptors, or no processes, for it.
        """
        attempt = self._attempts.get(slot, 0)
        self._attempts[slot] = attempt + 1
        number = self._start.first_rank + slot
        uid = f"{self._machine}.{number}.{attempt}"
        start = replace(self._start, generation=attempt + 1, restart_count=attempt)
        prepared = prepare(self._job, start, slot, self._around)
        prepared.variables.update({NAME: uid, **self._marks(uid)})
        channel, theirs = Channel.pair(self._selector, lambda datagram: self._heard(member, datagram))
        member = Member(uid, slot, number, channel, time.monotonic(), is_replacement=attempt > 0)
        self.members[slot] = member
        try:
            self._forker.start(Request(prepared, theirs, lambda pid: self._started(member, prepared, pid)))
        except OSError:
            prepared.close()
            self._forget(member)
            raise

    def by_uid(self, uid: str) -> Member | None:
        """Returns the worker of this name, if it runs or is about to."""
        return next((member for member in self.members.values() if member.uid == uid), None)

    def pids(self) -> list[int]:
        """Returns the process ids of the workers whose end is not known yet."""
        self._forker.read()  # those that have just been forked
        return [member.worker.pid for member in self.members.values() if member.worker is not None and member.runs]

    def interactive(self) -> Worker | None:
        """Returns the worker that waits for typed input: it is in `paceline.breakpoint`, or reads the terminal."""
        running = [member.worker for member in self.members.values() if member.worker is not None and member.runs]
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._around.keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""
        for member in self.members.values():
            member.signal(number)

    def end(self, number: int) -> None:
        """Sends a signal that ends workers, also to those that are stopped, and starts no more."""
        self._forker.cancel()
        for member in [each for each in self.members.values() if each.worker is None]:
            self._forget(member)
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped worker hears it now, before anything else of its program runs

    def kill(self) -> None:
        """Kills the workers at once."""
        self.end(signal.SIGKILL)

    def resize(self) -> None:
        """Passes the terminal's current size on to the workers that write to it."""
        for member in self.members.values():
            if member.following is not None:
                member.following.resize()

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        followings = [member.following for member in self.members.values() if member.following is not None]
        times_s = [self.stopped.deadline_s, self._forker.deadline_s, *(each.deadline_s for each in followings)]
        return min((each for each in times_s if each is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        self._forker.tick(now_s)
        for member in self.members.values():
            if member.following is not None:
                member.following.tick(now_s)
        if (deadline_s := self.stopped.deadline_s) is not None and now_s >= deadline_s:
            self.look_for_stopped(now_s)

    def frozen(self, now_s: float) -> list[Member]:
        """Returns the workers that have been stopped for too long."""
        frozen = self.stopped.frozen(now_s)
        return [member for member in self.members.values() if member.worker is not None and member.worker.pid in frozen]

    def look_for_stopped(self, now_s: float) -> None:
        """Notes which workers are stopped now."""
        self.stopped.look([pid for pid in self.pids() if is_stopped(pid)], now_s)

    def close(self) -> None:
        """Kills what still runs and closes every channel and pipe; idempotent."""
        for member in list(self.members.values()):
            if member.worker is not None:
                member.worker.signal(signal.SIGKILL)
                if member.worker.exit_code is None:
                    self._selector.unregister(member.worker.pidfd)
                    member.worker.collect()
            self._forget(member)
        self._around.keyboard.restore()

    def _started(self, member: Member, prepared: Prepared, pid: int) -> None:
        try:
            worker = prepared.started(pid)
        except ProcessLookupError:  # it ended at once
            prepared.close()
            self._forget(member)
            self._on_end(member, -signal.SIGKILL)
            return
        member.worker = worker
        member.following = Following(worker, prepared.outputs, self._selector)
        if self.members.get(member.slot) is not member:  # the job has ended meanwhile
            worker.signal(signal.SIGKILL)
            worker.collect()
            self._forget(member)
            return

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            self._ended(member, worker)

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)
        self._on_start(member)

    def _ended(self, member: Member, worker: Worker) -> None:
        code = worker.collect()
        member.channel.drain()
        if member.following is not None:
            member.following.drain()
        self._forget(member)
        if worker.reads:
            self._around.keyboard.restore()
        self._on_end(member, code)

    def _heard(self, member: Member, datagram: bytes) -> None:
        try:
            message = messages.from_worker(datagram)
        except ValueError:
            self._on_message(member, None, datagram)
        else:
            self._on_message(member, message, datagram)

    def _forget(self, member: Member) -> None:
        if self.members.get(member.slot) is member:
            del self.members[member.slot]
        member.channel.close()
        if member.following is not None:
            member.following.close()
