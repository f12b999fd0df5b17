"""Carries messages between the workers of this machine and the coordinator, and notes what they say."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from paceline.elastic import messages
from paceline.elastic.messages import Dismissed, FromWorker, Installed, Learn, Ready, View
from paceline.launch.elastic.crew import Member
from paceline.launch.elastic.departure import Departure
from paceline.launch.elastic.unrest import Unrest
from paceline.launch.elastic.yielding import Yielding
from paceline.launch.events import Events
from paceline.launch.nodes.messages import Report, WorkerSaid, WorkerStarted


class Post:
    """What workers and the coordinator tell each other.

    Args:
        events: where it is written down when workers begin and take part.
        departure: is told when a worker of this machine has taken part.
        unrest: is told who takes part; None without `--chaos`.
        say: tells the user something.
        send: reports to the coordinator.
    """

    def __init__(
        self,
        events: Events,
        departure: Departure,
        unrest: Unrest | None,
        say: Callable[[str], None],
        send: Callable[[Report], None],
    ) -> None:
        self._events, self._departure, self._unrest = events, departure, unrest
        self._say, self._send = say, send
        self._yielding = Yielding()

    def started(self, member: Member) -> None:
        """Reports that a worker has a process."""
        assert member.worker is not None
        if member.is_replacement:
            self._yielding.begin(member.worker.pid)
        self._events.tell("worker", uid=member.uid, slot=member.slot, pid=member.worker.pid)
        self._send(WorkerStarted(member.uid))

    def heard(self, member: Member, message: FromWorker | None, datagram: bytes) -> None:
        """Passes on what a worker says; one that sends something else than messages is killed."""
        now_s = time.monotonic()
        match message:
            case None:
                self._say(f"{member} is killed, since it sent {datagram[:80]!r}, which is no message of a worker")
                member.signal(signal.SIGKILL)
                return
            case Ready():
                self._events.tell("ready", uid=member.uid, after_ms=round(1000 * (now_s - member.asked_s)))
            case Installed(generation):
                self._departure.took_part = True
                self._events.tell("installed", uid=member.uid, view=generation)
                if self._unrest is not None:
                    self._unrest.entered(member, member.life.took_part_s is None, now_s)
        member.life.heard(message, now_s)
        self._send(WorkerSaid(member.uid, datagram.decode()))

    def tell(self, member: Member, body: str) -> None:
        """Passes on what the coordinator says to a worker."""
        message = messages.to_worker(body.encode())
        if isinstance(message, Dismissed):
            member.life.dismissed = message.code
            if message.code:
                self._say(f"{member} is dismissed: {message.reason}")
        if isinstance(message, (Learn, View)) and member.worker is not None:
            self._yielding.end(member.worker.pid)
        member.channel.send(body.encode())

    def ended(self, member: Member) -> None:
        """Forgets a worker."""
        if member.worker is not None:
            self._yielding.forget(member.worker.pid)
