"""Finds out how the workers of an elastic job on this machine have ended, and shows it to the user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from paceline.launch.elastic.crew import Member
from paceline.launch.elastic.notices import consequence, manner
from paceline.launch.elastic.replacement import Close, Fate, Replace
from paceline.launch.failures import Failure, keep, read_record
from paceline.launch.following import failure_of
from paceline.launch.memory import MemoryWatch
from paceline.launch.watching import ending_of
from paceline.observe.carefully import carefully
from paceline.observe.watching import Watched


class Endings:
    """The ends of this machine's workers.

    Args:
        reads: whether the recordings of workers that have ended are read.
        word: what a worker's number is.
        say: shows the user a line.
    """

    def __init__(self, reads: bool, word: str, say: Callable[[str], None]) -> None:
        self.failures: list[Failure] = []
        self._reads, self._word, self._say = reads, word, say
        self._memory = MemoryWatch()
        self._recordings: dict[str, int] = {}  # by worker, descriptors of what it records

    def began(self, member: Member) -> None:
        """A worker runs."""
        if self._reads and member.worker is not None and member.worker.memory is not None:
            with contextlib.suppress(OSError):  # there are no more descriptors
                self._recordings[member.uid] = os.dup(member.worker.memory.fd)

    def failure_of(self, member: Member, code: int) -> Failure | None:
        """Returns how a worker failed that has ended with `code`; None if it has not."""
        if code == 0 or member.worker is None:
            return None
        failure = failure_of(member.worker, code, read_record(member.worker.error_file), self._memory)
        keep(failure)
        return failure

    def report(
        self, member: Member, code: int, fate: Fate, failure: Failure | None, decision: Replace | Close, is_over: bool
    ) -> None:
        """Shows how a worker has ended, and what follows.

        Args:
            member: the worker.
            code: its exit code.
            fate: why it has ended.
            failure: how it failed, if it did.
            decision: whether another takes its place.
            is_over: the job is ending.
        """
        if failure is not None and (fate in (Fate.FAILED, Fate.REFUSED) or member.life.has_finished):
            self.failures.append(failure)
        is_expected = fate in (Fate.LEFT, Fate.RELEASED) or member.life.took_part_s is None
        if fate is Fate.DONE or (is_over and is_expected):
            return
        follows = "the job is ending" if is_over else consequence(decision)
        self._say(f"{self._verdict(member, code, fate, failure)}; {follows}")

    def forget(self, member: Member) -> None:
        """Gives back what was kept for a worker that has ended."""
        if (recording := self._recordings.pop(member.uid, None)) is not None:
            os.close(recording)

    def close(self) -> None:
        """Gives back what was kept for all workers; idempotent."""
        while self._recordings:
            os.close(self._recordings.popitem()[1])
        self._memory.close()

    def _verdict(self, member: Member, code: int, fate: Fate, failure: Failure | None) -> str:
        """Returns a sentence on a worker's end, which is that of other jobs if it has failed."""
        if fate is Fate.RELEASED:
            return f"{member} has ended, since the others went on without it"
        if failure is None or member.life.is_fenced or fate not in (Fate.FAILED, Fate.KILLED):
            return f"{member} {manner(member.life, failure)}"
        number, recording = member.number, self._recordings.get(member.uid)
        if recording is not None:
            from paceline.observe.diagnosis import died
            from paceline.observe.looking import last_look

            worker = Watched(number, failure.pid, recording, ending_of(code, failure))
            verdict = carefully(lambda: died(last_look([worker]).ranks[0], self._word), None)
            name = f"{self._word} {number} failed: "
            if verdict is not None and name in verdict.sentence:
                more = f": {failure.memory}" if failure.memory is not None else ""
                return verdict.sentence.replace(name, f"{member} failed: ", 1) + more
        return f"{member} {manner(member.life, failure)}"
