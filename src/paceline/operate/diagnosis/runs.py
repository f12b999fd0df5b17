"""The directories of jobs: where they are, what is in them, and which old ones may go.

The launcher of each machine makes one directory for each job that it runs, RUNS/ID, or LOG_DIR/RUN_ID if it was given
--log-dir. In it are

- `job.json`: the command, the variables' names, the versions, and how the job ended;
- `events.jsonl`: what the launcher did, one event a line;
- `attempt_N/RANK/`: what a worker left: `recording.record`, and, if they are kept, `stdout.log`, `stderr.log` and
  `error.json`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.operate.diagnosis.clock_offset import Offset

DIRECTORY_VARIABLE = "PACELINE_RUNS_DIR"
JOB_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
RECORDING_FILE = "recording.record"

MOST_RUNS = 20
MOST_RUNS_WITH_FAILURES = 100
_DAY_S = 86400.0


class RunStatus(Enum):
    """How far a job has come, on one machine."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"  # by a signal
    LOST = "lost"  # its launcher has ended without saying how


@dataclass(frozen=True)
class JobRun:
    """One job on one machine, from its `job.json`.

    Attributes:
        pid: the launcher's process.
        world_size: how many ranks there are on all machines; 0 if that is not known.
        clock: the offset to the clock of the machine where the job's machines met, once the job has ended.
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


def runs_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of this user's jobs: PACELINE_RUNS_DIR, or paceline/runs where programs keep state."""
    if given := environment.get(DIRECTORY_VARIABLE):
        return Path(given)
    state = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "paceline", "runs")


def read_run(directory: Path) -> JobRun | None:
    """Returns the job of a directory, or None if it is none."""
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
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_runs(directory: Path) -> list[JobRun]:
    """Returns the jobs in a directory, the latest first."""
    try:
        found = [read_run(each) for each in directory.iterdir()]
    except OSError:
        return []
    return sorted((run for run in found if run is not None), key=lambda run: run.started_s, reverse=True)


def outdated(runs: Sequence[JobRun], now_s: float) -> list[JobRun]:
    """Returns which of these jobs may be removed.

    `MOST_RUNS` are kept, and of older ones those that still run, and those that failed less than a day ago as long as
    no more than `MOST_RUNS_WITH_FAILURES` are kept.
    """
    old = sorted(runs, key=lambda run: run.started_s, reverse=True)[MOST_RUNS:]
    failures = [
        run for run in old if run.state in (RunStatus.FAILED, RunStatus.LOST) and now_s - run.started_s < _DAY_S
    ]
    kept = {run.id for run in failures[: MOST_RUNS_WITH_FAILURES - MOST_RUNS]}
    return [run for run in old if run.state is not RunStatus.RUNNING and run.id not in kept]


def when(run: JobRun) -> str:
    """Returns the local time at which the job started, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_s))


def _launcher_runs(facts: Mapping[str, Any]) -> bool:
    """Returns whether the job's launcher still runs, as far as this machine can tell."""
    if facts["host"] != os.uname().nodename:
        return True
    try:
        started = Path(f"/proc/{facts['pid']}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return False
    return bool(started == facts["pid_started"])
