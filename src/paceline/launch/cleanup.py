"""Holds what a job has on this machine besides its workers, and ends all of it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable

from paceline.launch import cgroup
from paceline.launch.lifeline import (
    MARK,
    Guard,
    adopt_orphans,
    children,
    kill_marked,
    kill_orphans,
    kill_sessions,
    reap_orphans,
)

_LONGEST_PATH = 80  # of the 107 bytes of a Unix socket's path, less the names inside the directory


class Cleanup:
    """The job's directory, its cgroup where there can be one, its mark and its guards; `close` ends them all.

    Create it before any thread starts.
    """

    def __init__(self) -> None:
        self.directory = _directory()
        # Inside another job the mark begins with that job's, so that whatever ends that job ends this one too.
        self._mark = f"{os.environ.get(MARK, '')}{secrets.token_hex(8)}."
        self._others = children()
        planned = cgroup.Cgroup.planned()
        self._guard = Guard(self.directory, self._mark, planned)
        self._cgroup = planned if planned is not None and planned.make() else None  # which the guards would remove
        adopt_orphans()

    def variables(self, name: str) -> dict[str, str]:
        """Returns the variables that workers need in their environment; `name` tells them from the job's others."""
        variables = {MARK: f"{self._mark}{name}."}
        if self._cgroup is not None:
            variables[cgroup.VARIABLE] = str(self._cgroup.directory)
        return variables

    def watch(self, worker: int) -> None:
        """Makes the guards end the session of this worker if the launcher is killed."""
        self._guard.watch(worker)

    def reap(self, workers: Iterable[int]) -> None:
        """Reaps the adopted processes that have ended; the code that started the `workers` reaps those."""
        reap_orphans([*self._guard.pids, *workers])

    def end_generation(self, name: str) -> None:
        """Kills the processes that all workers, which have ended and were marked with `name`, leave behind."""
        self._guard.forget()
        if self._cgroup is not None:
            self._cgroup.kill()
        kill_marked(f"{self._mark}{name}.")
        kill_orphans([*self._others, *self._guard.pids])

    def end_worker(self, name: str, worker: int, others: Iterable[int]) -> None:
        """Kills what one worker, which has ended and was marked with `name`, leaves behind; `others` go on."""
        self._guard.forget()
        for other in others:
            self._guard.watch(other)
        kill_marked(f"{self._mark}{name}.")
        kill_sessions([worker])

    def close(self) -> None:
        """Kills what is left of the job and removes its directory and cgroup."""
        self._guard.close()
        kill_marked(self._mark)
        kill_orphans(self._others)
        if self._cgroup is not None:
            self._cgroup.remove()
        reap_orphans([])
        shutil.rmtree(self.directory, ignore_errors=True)


def _directory() -> str:
    """Makes a directory for the job, with a path short enough for a Unix socket."""
    directory = tempfile.mkdtemp(prefix="paceline-")
    if len(os.fsencode(directory)) <= _LONGEST_PATH:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
