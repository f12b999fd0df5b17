"""What a launcher remembers of its workers and of the job, to report it to a coordinator that it follows anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from paceline.elastic.knowledge import Knowledge, Report, WorkerReport, merge
from paceline.elastic.messages import Finished, FromWorker, View
from paceline.elastic.standing import Standing

_REMEMBERED = 256  # workers that have ended


@dataclass
class _Running:
    standing: Standing = field(default_factory=Standing)
    stalled: str | None = None


@dataclass
class Account:
    """Keeps what a coordinator needs to know of one machine.

    What the coordinator tells the machine is noted here when it comes, before anything is passed on to a worker: so a
    view that some worker may have heard of is known to every coordinator that this launcher follows later.
    """

    host: str
    slots: int
    number: int = -1
    first_slot: int = 0
    knowledge: Knowledge = field(default_factory=Knowledge)
    is_leaving: bool = False
    _workers: dict[str, _Running] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _has_failed: bool = False  # a worker has, after its loop
    _ended: dict[str, tuple[str, int]] = field(default_factory=dict)

    def started(self, uid: str) -> None:
        """A worker runs."""
        self._workers.setdefault(uid, _Running()).stalled = None

    def said(self, uid: str, message: FromWorker) -> None:
        """A worker has sent a message."""
        if uid in self._workers:
            self._workers[uid].standing.heard(message)
            self._workers[uid].stalled = None
            if isinstance(message, Finished):
                self._finished.add(uid)

    def stalled(self, uid: str, why: str) -> None:
        """A worker does nothing."""
        if uid in self._workers:
            self._workers[uid].stalled = why

    def ended(self, uid: str, how: str, code: int) -> None:
        """A worker has ended."""
        self._workers.pop(uid, None)
        self._has_failed |= uid in self._finished and code > 0
        self._ended[uid] = (how, code)
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    @property
    def has_finished(self) -> bool:
        """Whether a worker of this machine has come to the end of the training, and none has failed since."""
        return bool(self._finished) and not self._has_failed

    @property
    def is_done(self) -> bool:
        """Whether this machine's part of the job is over."""
        return self.has_finished and not self._workers

    def learns(self, knowledge: Knowledge) -> None:
        """The coordinator tells what it knows."""
        self.knowledge = merge([self.knowledge, knowledge])

    def passes_on(self, view: View) -> None:
        """The coordinator tells a worker a view."""
        self.knowledge = merge([self.knowledge, Knowledge(term=view.generation >> 32, views=(view,))])

    def machine_ended(self, number: int) -> None:
        """The launcher of that machine has ended, and all that it ever told this one is known."""
        ended = {*self.knowledge.ended, number}
        self.knowledge = msgspec.structs.replace(self.knowledge, ended=tuple(sorted(ended)))

    def report(self) -> Report:
        """Returns what a coordinator that is followed from now on is told."""
        workers = [
            WorkerReport(uid, tuple(each.standing.messages), each.stalled) for uid, each in self._workers.items()
        ]
        ended = tuple((uid, how, code) for uid, (how, code) in self._ended.items())
        return Report(
            self.number,
            self.host,
            self.slots,
            self.first_slot,
            self.knowledge,
            tuple(workers),
            ended,
            self.is_leaving,
        )
