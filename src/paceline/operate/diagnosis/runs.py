"""Job directories: their location and contents, and the selection of old directories to remove.

The launcher on each machine creates one directory per job: RUNS/ID, or LOG_DIR/RUN_ID with --log-dir. It contains

- `job.json`: the command, the names of the environment variables, the versions, and the job's outcome;
- `events.jsonl`: the launcher's actions, one JSON object per line;
- `attempt_N/RANK/`: a worker's `recording.record` and, if saved, `stdout.log`, `stderr.log` and `error.json`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.linux import process_fields
from paceline.operate.diagnosis.clock_offset import Offset

RUNS_DIRECTORY_VARIABLE = "PACELINE_RUNS_DIR"
JOB_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
RECORDING_FILE = "recording.record"

MOST_RUNS = 20
MOST_RUNS_WITH_FAILURES = 100
_DAY_S = 86400.0


class RunStatus(Enum):
    """Status of a job on one machine."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"  # the job was terminated by a signal
    LOST = "lost"  # the launcher exited without recording an outcome


@dataclass(frozen=True)
class JobRun:
    """A job on one machine, as described by its `job.json`.

    Attributes:
        id: the name of the job's directory.
        job: the name of the job, the same on all machines.
        workers: the number of workers on this machine.
        state: the status of the job; `exit_code` is None while it runs.
        clock: the offset to the clock of the machine that hosted the launchers' rendezvous; None while the job runs,
            or if unknown.
        pid: the launcher's process id.
        world_size: the total number of ranks on all machines; 0 if unknown.
        exit_lines: the line at which each rank of the last attempt called `sys.exit` or raised SystemExit with exit
            code 0, keyed by rank; other ranks are missing.
    """

    id: str
    directory: Path
    job: str
    command: tuple[str, ...]
    host: str
    workers: int
    started_s: float
    ended_s: float | None
    state: RunStatus
    exit_code: int | None
    clock: Offset | None = None
    pid: int = 0
    world_size: int = 0
    exit_lines: Mapping[int, str] = field(default_factory=dict)


def runs_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory with this user's jobs: PACELINE_RUNS_DIR, or paceline/runs in the XDG state directory."""
    if given := environment.get(RUNS_DIRECTORY_VARIABLE):
        return Path(given)
    state = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "paceline", "runs")


def files_of_job(directory: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Returns the sorted paths of a job's files that match a pattern.

    Searches the job's directory and its subdirectories for attempts and ranks. The directory may also contain one such
    job directory for each machine. Other subdirectories are not searched, because the user may have passed the wrong
    directory, such as a home directory.
    """
    levels = ("", "*/", "attempt_*/*/", "*/attempt_*/*/")
    return sorted({path for level in levels for path in Path(directory).glob(level + pattern)})


def read_run(directory: Path) -> JobRun | None:
    """Returns the job in a directory, or None if the directory does not contain a job."""
    try:
        facts: dict[str, Any] = json.loads((directory / JOB_FILE).read_bytes())
        state = RunStatus(facts["state"])
        if state is RunStatus.RUNNING and not _launcher_runs(facts):
            state = RunStatus.LOST
        return JobRun(
            id=directory.name,
            directory=directory,
            job=facts["job"],
            command=tuple(facts["command"]),
            host=facts["host"],
            workers=facts["workers"],
            started_s=facts["started_s"],
            ended_s=facts.get("ended_s"),
            state=state,
            exit_code=facts.get("exit_code"),
            clock=Offset(**facts["clock"]) if "clock" in facts else None,
            pid=facts.get("pid", 0),
            world_size=facts.get("world_size", 0),
            exit_lines={int(rank): str(line) for rank, line in dict(facts.get("exit_lines", {})).items()},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_runs(directory: Path) -> list[JobRun]:
    """Returns the jobs in a directory, latest first."""
    try:
        found = [read_run(path) for path in directory.iterdir()]
    except OSError:
        return []
    return sorted((run for run in found if run is not None), key=lambda run: run.started_s, reverse=True)


def outdated(runs: Sequence[JobRun], now_s: float) -> list[JobRun]:
    """Returns the jobs that may be removed.

    The latest `MOST_RUNS` jobs are kept. Older jobs are kept while they are running. Older jobs that failed less than a
    day ago are kept up to a total of `MOST_RUNS_WITH_FAILURES`.
    """
    old = sorted(runs, key=lambda run: run.started_s, reverse=True)[MOST_RUNS:]
    failures = [
        run for run in old if run.state in (RunStatus.FAILED, RunStatus.LOST) and now_s - run.started_s < _DAY_S
    ]
    kept = {run.id for run in failures[: MOST_RUNS_WITH_FAILURES - MOST_RUNS]}
    return [run for run in old if run.state is not RunStatus.RUNNING and run.id not in kept]


def when(run: JobRun) -> str:
    """Formats the local time at which the job started."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_s))


def _launcher_runs(facts: Mapping[str, Any]) -> bool:
    """Returns True if the job's launcher is still running. A launcher on another machine is assumed to be running."""
    if facts["host"] != os.uname().nodename:
        return True
    try:
        started = process_fields(facts["pid"])[19]
    except (OSError, IndexError):
        return False
    return bool(started == facts["pid_started"])
