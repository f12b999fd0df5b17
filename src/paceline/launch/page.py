"""The live page of a job, as its launcher knows it: it opens the page, tells it what happens, and closes it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from paceline.launch.job import Job
from paceline.launch.local_notes import LocalNotes
from paceline.launch.nodes.messages import AskStacks, Told, Watching
from paceline.launch.outlook import decode
from paceline.observe.live.access import Access, name_of, new_token
from paceline.observe.live.addresses import ADDRESS_FILE, Place, lines, write_address
from paceline.observe.live.lookout import Lookout
from paceline.observe.live.notes import Note
from paceline.observe.live.sample import Facts, Verdict
from paceline.observe.live.serving import Serving
from paceline.observe.watching import Watched

_EVERY_S = 0.5  # between two looks at which workers run


class Page:
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
        send: Callable[[Watching | AskStacks], None],
    ) -> None:
        options = job.page
        assert options is not None
        self.local = LocalNotes()
        self._next_s = 0.0
        self._send = send
        self._has_others = job.rendezvous.address is not None
        self._was_watched = False
        self._is_asking = False
        self._facts = Facts(
            run_id=job.run_id,
            command=shlex.join(["paceline", "run", *job.command.argv]),
            started_s=time.monotonic(),
            security=security,
            is_elastic=job.elastic is not None,
        )
        lookout = Lookout(self.local.notes, self._facts)
        token = new_token()
        access = Access(token, name_of(job.run_id), frozenset(options.hosts), options.acts)
        listener = Place(options.port, options.socket).listen()
        told = lines(listener, token, options.prefix)
        try:
            self._serving = Serving(listener, lookout.look, access, options.prefix, {"stacks": self._take_stacks}, say)
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
            self.note(decode(body))
        except ValueError:  # of another version
            return

    def stalled(self, told: Told) -> None:
        """Notes why the job does not get on, or that it does so again."""
        self.note(Verdict(told.text, told.blamed, (), time.monotonic()) if told.is_stall else None)

    def generation(self, world_size: int, restarts: int) -> None:
        """Notes that workers are started, as so many ranks, after so many restarts."""
        self._facts = replace(self._facts, world_size=world_size, restarts=restarts)
        self.note(self._facts)

    @property
    def deadline_s(self) -> float:
        """When (monotonic) `watch` is to be called next."""
        return self._next_s

    def watch(self, now_s: float, workers: Callable[[], Iterable[Watched]]) -> None:
        """Notes which workers have begun and which have ended, if that is due."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        if self._has_others and self._serving.is_watched != self._was_watched:
            self._was_watched = self._serving.is_watched
            self._send(Watching(self._was_watched))
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
