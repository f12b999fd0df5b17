"""Says why the processes of `spawn` make no progress or have failed, while somebody waits for them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from paceline.launch.failures import Failure, Record
from paceline.launch.watching import Watcher, ending_of
from paceline.observe.carefully import carefully
from paceline.observe.watching import Said, Watched
from paceline.record.memory import SUFFIX

if TYPE_CHECKING:
    from paceline.observe.evidence import Ending
    from paceline.observe.picture import Picture
    from paceline.observe.verdict import Verdict


class SpawnWatch:
    """Watches processes until `close`; whoever waits for them calls `tick` and, when it is readable, `arrived`.

    Args:
        processes: by rank.
        started_ns: when (time of the day) the first of them was started.
        directory: where they record into files of their own.
        stall_after_s: how long a call may last before it is explained; 0 watches nothing.
    """

    def __init__(self, processes: Sequence[BaseProcess], started_ns: int, directory: str, stall_after_s: float) -> None:
        self._processes = processes
        self._started_ns = started_ns
        self._directory = directory
        self._recordings: dict[int, int] = {}  # descriptors, by rank
        self._exceptions: dict[int, Record] = {}  # by rank
        self._said = Said()
        self._started_s = time.monotonic()
        self._is_on = stall_after_s > 0
        self._watcher = Watcher(stall_after_s, self._watched, self._report)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `arrived` should be called."""
        return self._watcher.fileno()

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        return self._watcher.deadline_s

    def tick(self) -> None:
        """Begins a look at the processes, if that is due."""
        self._watcher.tick(time.monotonic())

    def arrived(self) -> None:
        """Says what a look has shown."""
        self._watcher.arrived()

    def raised(self, rank: int, record: Record) -> None:
        """Notes the exception that ends a rank."""
        self._exceptions[rank] = record

    def why(self) -> str:
        """Returns a sentence on the cause of a failure; empty if that is not known."""
        from paceline.observe.glancing import glance

        picture = carefully(lambda: glance(self._watched()), None) if self._is_on else None
        verdict = _verdict_on(picture) if picture is not None else None
        return verdict.sentence if verdict is not None and verdict.is_fault else ""

    def conclude(self) -> None:
        """Says which ranks the others waited for as a rule, in a job that has ended well and ran for long enough."""
        if self._watcher.wants_the_end(False, time.monotonic() - self._started_s, len(self._processes)):
            from paceline.observe.lateness import lateness
            from paceline.observe.looking import last_look

            for text in carefully(lambda: lateness([last_look(self._watched())]), []):
                _say(text)

    def close(self) -> None:
        """Waits for a look that goes on; idempotent."""
        self._watcher.close(lives_on=True)
        for recording in self._recordings.values():
            os.close(recording)
        self._recordings.clear()

    def _watched(self) -> list[Watched]:
        self._find_recordings()
        return [
            Watched(rank, process.pid or 0, self._recordings.get(rank), self._ending(rank, process))
            for rank, process in enumerate(self._processes)
        ]

    def _find_recordings(self) -> None:
        """Opens the recordings that have begun since: a process makes its file when it opens its first group."""
        missing = {process.pid: rank for rank, process in enumerate(self._processes) if rank not in self._recordings}
        if not missing:
            return
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                begun_ns, _, pid = name.removesuffix(SUFFIX).partition("-")
                if begun_ns.isdecimal() and pid.isdecimal() and int(begun_ns) >= self._started_ns:
                    rank = missing.get(int(pid))
                    if rank is not None:
                        path = os.path.join(self._directory, name)
                        self._recordings[rank] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _ending(self, rank: int, process: BaseProcess) -> Ending | None:
        record = self._exceptions.get(rank)
        code = process.exitcode
        if code is None:
            if record is None:
                return None
            code = 1
        has_failed = record is not None or code != 0
        failure = Failure(rank, process.pid or 0, code, time.time(), record) if has_failed else None
        return ending_of(code, failure)

    def _report(self, body: str, _: bool) -> None:
        """Takes the picture of a stall, as JSON; nothing if the processes go on."""
        now_s = time.monotonic()
        if not body:
            resumed = self._said.resumed(now_s)
            if resumed is not None:
                _say(resumed)
            return
        from paceline.observe.picture import decode

        picture = decode(body)
        verdict = _verdict_on(picture)
        if verdict is not None and picture.stalled_since_s is not None:
            text = self._said.tell(verdict, picture.stalled_since_s)
            if text is not None:
                _say(text)


def _verdict_on(picture: Picture) -> Verdict | None:
    from paceline.observe.diagnosis import diagnose
    from paceline.observe.picture import scene_of

    return carefully(lambda: diagnose(scene_of([picture])), None)


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
