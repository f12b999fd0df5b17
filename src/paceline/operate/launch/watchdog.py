"""`Watchdog`: takes snapshots of this machine's workers if they stall or fail.

Once a second, the watchdog reads a few bytes of each worker's recording, which is enough while the workers make
progress. A snapshot takes longer and runs on a separate thread. The modules for snapshots are imported when the first
worker records something. At startup, the imports would occupy a core that the workers need, and after a failure they
would delay the diagnosis.
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
from paceline.operate.launch.failures import WorkerFailure

if TYPE_CHECKING:
    from paceline.operate.diagnosis.job_snapshot import RankExitStatus
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot

_FEW_WORKERS = 8
_BEFORE_S = 0.25  # interval between checks until the workers have recorded something
_LONGEST_PAUSE_S = 30.0  # maximum interval between snapshots that do not find a stall


class Watchdog:
    """Monitors workers until `close` is called.

    Args:
        stall_after_s: The duration after which a call counts as stalled; 0 turns the watchdog off.
        workers: A function that returns the running workers.
        report: A function called with each snapshot as JSON, and a flag that is True if the snapshot was taken because
            of a failure. When workers resume after a reported stall, the function is called with "". `tick` and
            `collect` call the function on the launcher's thread.
    """

    def __init__(
        self, stall_after_s: float, workers: Callable[[], Sequence[WatchedWorker]], report: Callable[[str, bool], None]
    ) -> None:
        self.threshold = StallThreshold.of(stall_after_s)
        self.is_on = stall_after_s > 0
        self._workers = workers
        self._report = report
        self._look_s = min(LOOK_S, self.threshold.floor_s / 4)
        self._every_s = min(1.0, self.threshold.floor_s / 4)
        self._activity = ActivityTracker()
        self._next_s = time.monotonic() + self._every_s
        self._next_look_s = 0.0
        self._pause_s = 0.0
        self._has_reported = False
        # snapshots in progress; the key is True for a snapshot of a failure
        self._threads: dict[bool, threading.Thread] = {}
        self._is_owed = False  # whether a snapshot was requested while another one was in progress
        self._preparing: threading.Thread | None = None
        self._is_paused = False
        self._snapshots: queue.SimpleQueue[tuple[MachineSnapshot | None, bool]] = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `collect` should be called."""
        return self._read_fd

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called; None for never."""
        return self._next_s if self.is_on else None

    def tick(self, now_s: float) -> None:
        """Checks the workers' recordings, and starts a snapshot if there has been no progress for too long."""
        if not self.is_on or now_s < self._next_s:
            return
        self._next_s = now_s + (self._every_s if self._preparing is not None else min(_BEFORE_S, self._every_s))
        if self._is_paused:
            return
        workers = self._workers()
        for worker in workers:
            if worker.recording is not None and worker.ending is None:
                tick = latest_tick(worker.recording)
                self._activity.note_tick(worker.number, tick, now_s)
                if tick and self._preparing is None:
                    self._prepare()
        self._activity.keep({worker.number for worker in workers})
        if not self._activity.quiet(now_s, self.threshold.floor_s - self._look_s):
            self._next_look_s = self._pause_s = 0.0
            if self._has_reported:
                self._has_reported = False
                self._report("", False)
        elif now_s >= self._next_look_s:
            quiet = self._activity.quiet(now_s, self.threshold.idle_s - self._look_s)
            self.start_snapshot(is_requested=False, may_be_idle=len(quiet) == len(workers))

    def start_snapshot(self, is_requested: bool, may_be_idle: bool = False) -> None:
        """Starts a snapshot unless one is in progress.

        With `is_requested`, the snapshot is reported even without a stall. `may_be_idle` is set if no worker has
        recorded anything for a long time.
        """

        def take(workers: Sequence[WatchedWorker]) -> MachineSnapshot | None:
            from paceline.operate.diagnosis.machine_snapshot import snapshot_if_stalled

            return snapshot_if_stalled(workers, self.threshold, is_requested, self._look_s, may_be_idle)

        if not self._is_paused:
            self._is_owed = self._is_owed or (is_requested and False in self._threads)
            self._begin(take, is_failure=False)

    def start_failure_snapshot(self, is_deep: bool = False) -> None:
        """Starts a snapshot of a failed job, even while the watchdog is paused, because all workers are about to exit.

        If `is_deep`, the snapshot includes many calls per worker, as required to diagnose mismatched calls.
        """

        def take(workers: Sequence[WatchedWorker]) -> MachineSnapshot | None:
            from paceline.operate.diagnosis.failure_snapshot import snapshot_failed_job

            return snapshot_failed_job(workers, is_deep)

        if self.is_on:
            self._begin(take, is_failure=True)

    def _prepare(self) -> None:
        def run() -> None:
            from paceline.operate.diagnosis.failure_snapshot import prepare

            explain_or_default(prepare, None)

        self._preparing = threading.Thread(target=run, name="paceline-prepare", daemon=True)
        self._preparing.start()

    def _begin(self, take: Callable[[Sequence[WatchedWorker]], MachineSnapshot | None], is_failure: bool) -> None:
        if is_failure in self._threads:
            return
        workers = [_with_own_descriptor(worker) for worker in self._workers()]

        def run() -> None:
            snapshot = None
            try:
                snapshot = explain_or_default(lambda: take(workers), None)
            finally:
                for worker in workers:
                    if worker.recording is not None:
                        os.close(worker.recording)
                self._snapshots.put((snapshot, is_failure))
                with contextlib.suppress(OSError):  # the wake-up pipe was closed in the meantime
                    os.write(self._write_fd, b".")

        self._threads[is_failure] = threading.Thread(target=run, name="paceline-snapshot", daemon=True)
        self._threads[is_failure].start()

    def collect(self) -> None:
        """Reports a completed snapshot."""
        os.read(self._read_fd, 1)
        snapshot, is_failure = self._snapshots.get()
        del self._threads[is_failure]
        if not is_failure:
            self._pause_s = min(_LONGEST_PAUSE_S, max(2 * self._pause_s, self.threshold.floor_s / 2))
            self._next_look_s = time.monotonic() + self._pause_s
        if snapshot is not None and is_failure:
            from paceline.operate.diagnosis.failure_snapshot import with_endings

            snapshot = with_endings(snapshot, self._workers())
        if snapshot is not None and (is_failure or not self._is_paused):
            self._has_reported = self._has_reported or snapshot.stalled_since_s is not None
            from paceline.operate.diagnosis.machine_snapshot import encode

            self._report(encode(snapshot), is_failure)
        if not is_failure and self._is_owed:
            self._is_owed = False
            if snapshot is None:
                self.start_snapshot(is_requested=True)

    def pause(self) -> None:
        """Stops taking snapshots of stalls and discards those in progress, because the workers are being stopped."""
        self._is_paused, self._has_reported, self._is_owed = True, False, False

    def resume(self) -> None:
        """Resumes after `pause`, with new workers."""
        self._is_paused = False

    def should_read_final_recordings(self, has_failed: bool, lasted_s: float, workers: int) -> bool:
        """Returns True if reading the recordings of exited workers is worth the time."""
        if not self.is_on:
            return False
        return has_failed or (lasted_s >= 2 * self.threshold.ceiling_s and workers <= _FEW_WORKERS)

    def close(self, lives_on: bool = False) -> None:
        """Waits for a snapshot in progress; idempotent.

        If this process may fork later (`lives_on`), a thread that imports modules is joined first, because a fork would
        inherit the locks of modules being imported and never release them.
        """
        if lives_on and self._preparing is not None:
            self._preparing.join()
        if self._read_fd >= 0:
            for thread in self._threads.values():
                thread.join()
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = -1


def _with_own_descriptor(worker: WatchedWorker) -> WatchedWorker:
    """Returns the worker with a duplicate of its descriptor, which remains open after the worker has exited."""
    try:
        return replace(worker, recording=None if worker.recording is None else os.dup(worker.recording))
    except OSError:  # no free descriptors
        return replace(worker, recording=None)


def latest_tick(recording: int) -> int:
    """Returns the tick of the latest record in a recording, or 0 if the recording is empty. This check is cheap."""
    with contextlib.suppress(OSError):
        data = os.pread(recording, layout.PROGRESS.size, layout.PROGRESS_AT)
        if len(data) == layout.PROGRESS.size:
            return int(layout.PROGRESS.unpack(data)[0])
    return 0


def final_snapshot(workers: Sequence[WatchedWorker]) -> str | None:
    """Returns a snapshot of exited workers as JSON, or None if they did not record anything."""
    from paceline.operate.diagnosis.machine_snapshot import encode, snapshot_ended_workers

    def take() -> str | None:
        snapshot = snapshot_ended_workers(workers)
        return encode(snapshot) if any(rank.calls for rank in snapshot.ranks) else None

    return explain_or_default(take, None)


def ending_of(exit_code: int, failure: WorkerFailure | None, exit_line: str = "") -> RankExitStatus | None:
    """Returns the exit status of a worker, or None if the launcher terminated the worker.

    `exit_line` is the line of the user's code that exited with exit code 0, or "".
    """
    from paceline.operate.diagnosis.job_snapshot import ExitReason, RankExitStatus

    now_s, behind_s = time.monotonic(), time.time() - time.monotonic()
    if failure is None:
        return RankExitStatus(ExitReason.FINISHED, now_s, line=exit_line) if exit_code == 0 else None
    record = failure.record
    at_s = (record.time_s if record is not None else failure.seen_s) - behind_s
    return RankExitStatus(ExitReason[failure.manner], at_s, failure.summary, failure.line, failure.handled)
