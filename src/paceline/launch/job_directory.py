"""The directory of a job on this machine: what it ran, what happened, and what its workers recorded."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from paceline import __version__
from paceline.launch.job import Job
from paceline.observe.clocks import Offset
from paceline.observe.runs import JOB_FILE, State, list_runs, outdated, runs_directory
from paceline.security.own_files import SharedFileError, require_own_directory

_SECRET = re.compile(r"token|secret|passw|passphrase|credential|api.?key|auth", re.IGNORECASE)
_HIDDEN = "***"
_MOST_OF_A_NAME = 40


class JobDirectory:
    """Makes and describes the directory; without a place for it, `path` is None and the job runs all the same.

    It is LOG_DIR/RUN_ID if the job was given --log-dir, otherwise a new one among those of `paceline runs`, of which
    the oldest are removed. `remark` says why there is none if the reason is another user's directory.

    Raises:
        SharedFileError: LOG_DIR/RUN_ID is a directory of another user, or a link.
    """

    def __init__(self, job: Job) -> None:
        self.path: Path | None = None
        self.remark: str | None = None
        self._facts: dict[str, object] = {
            "job": job.run_id,
            "command": without_secrets(job.command.argv),
            "directory": _working_directory(),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "pid_started": _started(),
            "workers": job.workers,
            "elastic": job.elastic is not None,
            "variables": sorted(os.environ),
            "started_s": time.time(),
            "state": State.RUNNING.value,
        }
        if job.output.log_dir is not None:  # where output goes, so that it is reported if that is impossible
            self.path = Path(job.output.log_dir, job.run_id)
        try:
            if self.path is None:
                self.path = _new(job)
            self.path.mkdir(parents=True, exist_ok=True)
            require_own_directory(str(self.path))
            self._write()
        except SharedFileError as error:
            if self.path is not None:
                raise
            self.remark = f"`paceline runs` will not list this job: {error}"
        except OSError:
            return

    def note(self, **facts: object) -> None:
        """Adds facts that became known later."""
        self._facts.update(facts)
        self._write()

    def conclude(self, code: int, was_stopped: bool, offset: Offset | None) -> None:
        """Writes down how the job ended on this machine, and how its clock differs from that of the meeting."""
        if offset is not None:
            self.note(clock=asdict(offset))
        state = State.STOPPED if was_stopped else State.FAILED if code else State.FINISHED
        self.note(state=state.value, exit_code=code, ended_s=time.time(), versions=_versions())

    def _write(self) -> None:
        if self.path is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the job
            written = self.path / f".{JOB_FILE}"
            written.write_text(json.dumps(self._facts, indent=1) + "\n")
            written.replace(self.path / JOB_FILE)


def without_secrets(argv: tuple[str, ...]) -> list[str]:
    """Returns a command's words without the values of options that seem to be secrets by their names."""
    shown: list[str] = []
    is_secret = False
    for word in argv:
        name, equals, _ = word.partition("=")
        shown.append(_HIDDEN if is_secret and not word.startswith("-") else word)
        is_secret = word.startswith("-") and bool(_SECRET.search(name)) and not equals
        if equals and _SECRET.search(name):
            shown[-1] = f"{name}={_HIDDEN}"
    return shown


def _new(job: Job) -> Path:
    root = runs_directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own_directory(str(root), may_be_roots=True)
    for run in outdated(list_runs(root), time.time()):
        shutil.rmtree(run.directory, ignore_errors=True)
    name = re.sub(r"[^\w.-]", "_", job.run_id)[:_MOST_OF_A_NAME]
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            path = root / (stamp + suffix)
            path.mkdir(mode=0o700)
            return path
    raise FileExistsError(stamp)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _started() -> str:
    """Returns when this process started, in ticks since the boot, which tells it from others with its number."""
    return Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"paceline": __version__, "python": sys.version.split()[0], "kernel": platform.release()}
    with contextlib.suppress(PackageNotFoundError):
        versions["torch"] = version("torch")
    return versions
