"""Watches this machine's workers while they run, and has somebody look when they make no progress.

A wake-up a second that reads a few bytes of each worker's recording tells that all is well. The look itself, which
takes longer, happens in a thread. What it needs is imported when the first worker records something: at its start the
launcher would keep a core from the workers, and after a failure the verdict would come later.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.comm.record import layout
from paceline.operate.diagnosis.stall_detector import (
    LOOK_S,
    ActivityTracker,
    StallThreshold,
    WatchedWorker,
    explain_or_default,
)
from paceline.operate.launch.workers.failures import WorkerFailure

if TYPE_CHECKING:
    from paceline.operate.diagnosis.job_snapshot import RankExitStatus
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot

_FEW_WORKERS = 8
_BEFORE_S = 0.25  # between wake-ups before the workers have recorded anything
_LONGEST_PAUSE_S = 30.0  # between two looks that found nothing


class Watchdog:
    """Watches workers until `close`.

    Args:
        stall_after_s: how long a call may last before it is explained; 0 watches nothing.
        workers: returns the workers that run.
        report: is called by `tick` or `arrived`, in the launcher's thread, with each picture as JSON, and whether it
            is of a failure; with nothing when the workers whose stall was reported go on.
    """

    def __init__(
        self, stall_after_s: float, workers: Callable[[], Sequence[WatchedWorker]], report: Callable[[str, bool], None]
    ) -> None:
        self.patience = StallThreshold.of(stall_after_s)
        self._is_on = stall_after_s > 0
        self._workers = workers
        self._report = report
        self._look_s = min(LOOK_S, self.patience.floor_s / 4)
        self._every_s = min(1.0, self.patience.floor_s / 4)
        self._pulse = ActivityTracker()
        self._next_s = time.monotonic() + self._every_s
        self._next_look_s = 0.0
        self._pause_s = 0.0
        self._has_reported = False
        self._threads: dict[bool, threading.Thread] = {}  # those that look now, by whether it is at a failure
        self._preparing: threading.Thread | None = None
        self._is_paused = False
        self._pictures: queue.SimpleQueue[tuple[MachineSnapshot | None, bool]] = queue.SimpleQueue()
        self._waiting, self._waking = os.pipe()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `arrived` should be called."""
        return self._waiting

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        return self._next_s if self._is_on else None

    def tick(self, now_s: float) -> None:
        """Feels the pulse of the workers, and begins a look if it is still for too long."""
        if not self._is_on or now_s < self._next_s:
            return
        self._next_s = now_s + (self._every_s if self._preparing is not None else min(_BEFORE_S, self._every_s))
        if self._is_paused:
            return
        workers = self._workers()
        for worker in workers:
            if worker.recording is not None and worker.ending is None:
                tick = latest_tick(worker.recording)
                self._pulse.note_tick(worker.number, tick, now_s)
                if tick and self._preparing is None:
                    self._prepare()
        self._pulse.keep({worker.number for worker in workers})
        if not self._pulse.quiet(now_s, self.patience.floor_s - self._look_s):
            self._next_look_s = self._pause_s = 0.0
            if self._has_reported:
                self._has_reported = False
                self._report("", False)
        elif now_s >= self._next_look_s:
            self.look(is_asked=False)

    def look(self, is_asked: bool) -> None:
        """Begins a look, unless one goes on; `is_asked` if another machine needs the picture in any case."""

        def see(workers: Sequence[WatchedWorker]) -> MachineSnapshot | None:
            from paceline.operate.diagnosis.machine_snapshot import snapshot_if_stalled

            return snapshot_if_stalled(workers, self.patience, is_asked, self._look_s)

        if not self._is_paused:
            self._begin(see, is_failure=False)

    def glance(self, is_deep: bool = False) -> None:
        """Takes a picture at once, also while paused: a worker here or elsewhere has failed, and all end soon.

        `is_deep` asks for many calls of each worker, since those of the one that failed did not fit.
        """

        def see(workers: Sequence[WatchedWorker]) -> MachineSnapshot | None:
            from paceline.operate.diagnosis.failure_snapshot import snapshot_failed_job

            return snapshot_failed_job(workers, is_deep)

        if self._is_on:
            self._begin(see, is_failure=True)

    def _prepare(self) -> None:
        def run() -> None:
            from paceline.operate.diagnosis.failure_snapshot import prepare

            explain_or_default(prepare, None)

        self._preparing = threading.Thread(target=run, name="paceline-prepare", daemon=True)
        self._preparing.start()

    def _begin(self, see: Callable[[Sequence[WatchedWorker]], MachineSnapshot | None], is_failure: bool) -> None:
        if is_failure in self._threads:
            return
        workers = [_with_a_descriptor_of_its_own(worker) for worker in self._workers()]

        def run() -> None:
            picture = None
            try:
                picture = explain_or_default(lambda: see(workers), None)
            finally:
                for worker in workers:
                    if worker.recording is not None:
                        os.close(worker.recording)
                self._pictures.put((picture, is_failure))
                with contextlib.suppress(OSError):  # closed meanwhile
                    os.write(self._waking, b".")

        self._threads[is_failure] = threading.Thread(target=run, name="paceline-look", daemon=True)
        self._threads[is_failure].start()

    def arrived(self) -> None:
        """Reports the picture of a look that has ended."""
        os.read(self._waiting, 1)
        picture, is_failure = self._pictures.get()
        del self._threads[is_failure]
        if not is_failure:
            self._pause_s = min(_LONGEST_PAUSE_S, max(2 * self._pause_s, self.patience.floor_s / 2))
            self._next_look_s = time.monotonic() + self._pause_s
        if picture is not None and is_failure:
            from paceline.operate.diagnosis.failure_snapshot import with_endings

            picture = with_endings(picture, self._workers())
        if picture is not None and (is_failure or not self._is_paused):
            self._has_reported = self._has_reported or picture.stalled_since_s is not None
            from paceline.operate.diagnosis.machine_snapshot import encode

            self._report(encode(picture), is_failure)

    def pause(self) -> None:
        """Looks at nothing, and drops what is being looked at, since the workers are ending."""
        self._is_paused, self._has_reported = True, False

    def resume(self) -> None:
        """Looks again, at new workers."""
        self._is_paused = False

    def should_read_final_recordings(self, has_failed: bool, lasted_s: float, workers: int) -> bool:
        """Returns whether the recordings of workers that have ended are worth the time that reading them takes."""
        if not self._is_on:
            return False
        return has_failed or (lasted_s >= 2 * self.patience.ceiling_s and workers <= _FEW_WORKERS)

    def close(self, lives_on: bool = False) -> None:
        """Waits for a look that goes on; idempotent.

        Args:
            lives_on: whether this process may fork later. A thread that imports modules then ends first: in a fork, the
                locks of the modules that it was importing would be held for ever.
        """
        if lives_on and self._preparing is not None:
            self._preparing.join()
        if self._waiting >= 0:
            for thread in self._threads.values():
                thread.join()
            os.close(self._waiting)
            os.close(self._waking)
            self._waiting = -1


def _with_a_descriptor_of_its_own(worker: WatchedWorker) -> WatchedWorker:
    """Returns the worker with a descriptor that stays open when the worker has ended."""
    try:
        return replace(worker, recording=None if worker.recording is None else os.dup(worker.recording))
    except OSError:  # there are no more descriptors
        return replace(worker, recording=None)


def latest_tick(recording: int) -> int:
    """Returns the tick of the latest record in this memory; 0 if there is none. This is cheap."""
    with contextlib.suppress(OSError):
        data = os.pread(recording, layout.PROGRESS.size, layout.PROGRESS_AT)
        if len(data) == layout.PROGRESS.size:
            return int(layout.PROGRESS.unpack(data)[0])
    return 0


def last_picture(workers: Sequence[WatchedWorker]) -> str | None:
    """Returns, as JSON, what is left of workers that have ended; None if they recorded nothing."""
    from paceline.operate.diagnosis.machine_snapshot import encode, snapshot_ended_workers

    def see() -> str | None:
        picture = snapshot_ended_workers(workers)
        return encode(picture) if any(rank.calls for rank in picture.ranks) else None

    return explain_or_default(see, None)


def ending_of(exit_code: int, failure: WorkerFailure | None) -> RankExitStatus | None:
    """Returns how a worker has ended; None if the launcher ended it."""
    from paceline.operate.diagnosis.job_snapshot import ExitReason, RankExitStatus

    now_s, behind_s = time.monotonic(), time.time() - time.monotonic()
    if failure is None:
        return RankExitStatus(ExitReason.FINISHED, now_s) if exit_code == 0 else None
    record = failure.record
    at_s = (record.time_s if record is not None else failure.seen_s) - behind_s
    return RankExitStatus(ExitReason[failure.manner], at_s, failure.summary, failure.line)
