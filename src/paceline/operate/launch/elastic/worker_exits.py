"""Finds out how the workers of an elastic job on this machine have ended, and shows it to the user.

What the user is shown about a worker of an elastic job that has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from paceline.operate.diagnosis.stall_detector import WatchedWorker, explain_or_default
from paceline.operate.launch.elastic.worker_pool import PoolWorker
from paceline.operate.launch.elastic.worker_replacement import CloseSlot, ExitCause, ReplaceWorker, WorkerHistory
from paceline.operate.launch.watchdog import ending_of
from paceline.operate.launch.workers.failures import WorkerFailure, read_record, write_error_json
from paceline.operate.launch.workers.out_of_memory import MemoryWatch
from paceline.operate.launch.workers.worker import failure_of


def describe_exit(life: WorkerHistory, failure: WorkerFailure | None) -> str:
    """Returns how a worker has ended: in a few words, with its exception or the kernel's figures if there are any."""
    if life.is_fenced:
        return "was stopped by a signal, so it was killed"
    if failure is None:
        return "has ended"
    if failure.record is not None:
        return f"failed: {failure.summary}"
    return f"failed: {failure.how}" if failure.memory is None else f"failed: {failure.how}: {failure.memory}"


def describe_decision(decision: ReplaceWorker | CloseSlot) -> str:
    """Returns what follows."""
    if isinstance(decision, ReplaceWorker):
        return f"another worker takes its place{f' in {decision.after_s:g} s' if decision.after_s else ''}"
    if decision.reason is not None:
        return f"nobody takes its place: {decision.reason}"
    return "it was asked to leave, so nobody takes its place"


def describe_slots(first: int, count: int, slots: int) -> str:
    """Returns which of a job's slots are on this machine."""
    if count == 1:
        return f"slot {first} of {slots} is here"
    return f"slots {first} to {first + count - 1} of {slots} are here"


class WorkerExits:
    """The ends of this machine's workers.

    Args:
        reads: whether the recordings of workers that have ended are read.
        word: what a worker's number is.
        say: shows the user a line.
    """

    def __init__(self, reads: bool, word: str, say: Callable[[str], None]) -> None:
        self.failures: list[WorkerFailure] = []
        self._reads, self._word, self._say = reads, word, say
        self._memory = MemoryWatch()
        self._recordings: dict[str, int] = {}  # by worker, descriptors of what it records

    def began(self, member: PoolWorker) -> None:
        """A worker runs."""
        if self._reads and member.worker is not None and member.worker.memory is not None:
            with contextlib.suppress(OSError):  # there are no more descriptors
                self._recordings[member.uid] = os.dup(member.worker.memory.fd)

    def failure_of(self, member: PoolWorker, code: int) -> WorkerFailure | None:
        """Returns how a worker failed that has ended with `code`; None if it has not."""
        if code == 0 or member.worker is None:
            return None
        failure = failure_of(member.worker, code, read_record(member.worker.error_file), self._memory)
        write_error_json(failure)
        return failure

    def report(
        self,
        member: PoolWorker,
        code: int,
        fate: ExitCause,
        failure: WorkerFailure | None,
        decision: ReplaceWorker | CloseSlot,
        is_over: bool,
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
        if failure is not None and (fate in (ExitCause.FAILED, ExitCause.REFUSED) or member.life.has_finished):
            self.failures.append(failure)
        is_expected = fate in (ExitCause.LEFT, ExitCause.RELEASED) or member.life.took_part_s is None
        if fate is ExitCause.DONE or (is_over and is_expected):
            return
        follows = "the job is ending" if is_over else describe_decision(decision)
        self._say(f"{self._verdict(member, code, fate, failure)}; {follows}")

    def forget(self, member: PoolWorker) -> None:
        """Gives back what was kept for a worker that has ended."""
        if (recording := self._recordings.pop(member.uid, None)) is not None:
            os.close(recording)

    def close(self) -> None:
        """Gives back what was kept for all workers; idempotent."""
        while self._recordings:
            os.close(self._recordings.popitem()[1])
        self._memory.close()

    def _verdict(self, member: PoolWorker, code: int, fate: ExitCause, failure: WorkerFailure | None) -> str:
        """Returns a sentence on a worker's end, which is that of other jobs if it has failed."""
        if fate is ExitCause.RELEASED:
            return f"{member} has ended, since the others went on without it"
        if failure is None or member.life.is_fenced or fate not in (ExitCause.FAILED, ExitCause.KILLED):
            return f"{member} {describe_exit(member.life, failure)}"
        number, recording = member.number, self._recordings.get(member.uid)
        if recording is not None:
            from paceline.operate.diagnosis.diagnosis import diagnose_exit
            from paceline.operate.diagnosis.machine_snapshot import snapshot_ended_workers

            worker = WatchedWorker(number, failure.pid, recording, ending_of(code, failure))
            verdict = explain_or_default(
                lambda: diagnose_exit(snapshot_ended_workers([worker]).ranks[0], self._word), None
            )
            name = f"{self._word} {number} failed: "
            if verdict is not None and name in verdict.sentence:
                more = f": {failure.memory}" if failure.memory is not None else ""
                return verdict.sentence.replace(name, f"{member} failed: ", 1) + more
        return f"{member} {describe_exit(member.life, failure)}"
