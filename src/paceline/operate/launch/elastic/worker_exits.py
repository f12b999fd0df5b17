"""Worker exits on this machine: their causes, and the messages that report them."""

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
    """Describes a worker's exit in a few words, including its exception or kernel statistics if available."""
    if life.is_fenced:
        return "was stopped by a signal, so it was killed"
    if failure is None:
        return "has ended"
    if failure.record is not None:
        return f"failed: {failure.summary}"
    return f"failed: {failure.how}" if failure.memory is None else f"failed: {failure.how}: {failure.memory}"


def describe_decision(decision: ReplaceWorker | CloseSlot) -> str:
    """Describes the consequence of a worker's exit."""
    if isinstance(decision, ReplaceWorker):
        return f"another worker takes its place{f' in {decision.after_s:g} s' if decision.after_s else ''}"
    if decision.reason is not None:
        return f"nobody takes its place: {decision.reason}"
    return "it was asked to leave, so nobody takes its place"


def describe_slots(first: int, count: int, slots: int) -> str:
    """Describes the range of slots on this machine."""
    if count == 1:
        return f"slot {first} of {slots} is here"
    return f"slots {first} to {first + count - 1} of {slots} are here"


class WorkerExits:
    """Tracks and reports the exits of this machine's workers.

    Args:
        reads: Whether to read the recordings of workers that have exited.
        word: The noun for a worker's number in messages, such as "slot".
        say: A function that prints a line for the user.
    """

    def __init__(self, reads: bool, word: str, say: Callable[[str], None]) -> None:
        self.failures: list[WorkerFailure] = []
        self._reads, self._word, self._say = reads, word, say
        self._memory = MemoryWatch()
        self._recordings: dict[str, int] = {}  # descriptors for recordings, by worker

    def began(self, member: PoolWorker) -> None:
        """Opens a running worker's recording and keeps it open after the worker exits."""
        if self._reads and member.worker is not None and member.worker.memory is not None:
            with contextlib.suppress(OSError):  # no free descriptor
                self._recordings[member.uid] = os.dup(member.worker.memory.fd)

    def failure_of(self, member: PoolWorker, code: int) -> WorkerFailure | None:
        """Returns the failure of a worker that exited with `code`, or None if the worker did not fail."""
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
        """Reports a worker's exit and its consequence.

        Args:
            member: The worker that has exited.
            code: The worker's exit code.
            fate: The cause of the exit.
            failure: The failure, or None.
            decision: The decision on whether to replace the worker.
            is_over: Whether the job is ending.
        """
        if failure is not None and (fate in (ExitCause.FAILED, ExitCause.REFUSED) or member.life.has_finished):
            self.failures.append(failure)
        is_expected = fate in (ExitCause.LEFT, ExitCause.RELEASED) or member.life.took_part_s is None
        if fate is ExitCause.DONE or (is_over and is_expected):
            return
        follows = "the job is ending" if is_over else describe_decision(decision)
        self._say(f"{self._verdict(member, code, fate, failure)}; {follows}")

    def forget(self, member: PoolWorker) -> None:
        """Releases the resources of a worker that has exited."""
        if (recording := self._recordings.pop(member.uid, None)) is not None:
            os.close(recording)

    def close(self) -> None:
        """Releases the resources of all workers. Idempotent."""
        while self._recordings:
            os.close(self._recordings.popitem()[1])
        self._memory.close()

    def _verdict(self, member: PoolWorker, code: int, fate: ExitCause, failure: WorkerFailure | None) -> str:
        """Returns a sentence about a worker's exit. For a failure, this is the diagnosis that other jobs use."""
        if fate is ExitCause.RELEASED:
            return f"{member} has ended, because the others continued without it"
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
