"""Job directory on this machine: the job's description, its events and its workers' recordings.

Events are JSON lines, which `--event-log-handler console` also writes to stderr. The launcher owns the memory that
workers record into. Recordings therefore outlive the workers, and the launcher writes them to the directory after the
workers have exited.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from paceline import __version__, linux
from paceline.comm.record import layout
from paceline.comm.record.recorder import HANDED_VARIABLE, MEMORY_NAME, HandedMemory, is_switched_off
from paceline.comm.security.own_files import SharedFileError, append_to, require_own_directory
from paceline.operate.dashboard.event_queue import Fact
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.diagnosis.runs import (
    EVENTS_FILE,
    JOB_FILE,
    RECORDING_FILE,
    RUNS_DIRECTORY_VARIABLE,
    RunStatus,
    list_runs,
    outdated,
    runs_directory,
)
from paceline.operate.launch.job import Job
from paceline.operate.launch.workers.output import Console

EventListener = Callable[[str, dict[str, Fact]], None]
# A worker must not be able to shrink memory that the launcher maps.
_SEALS = linux.F_SEAL_SEAL | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW
_FAST = 1  # zlib's fastest compression level
_MOST_FILES = 256  # maximum number of recordings per job, because many workers may die in a long elastic job
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|api.?key|auth", re.IGNORECASE)
_HIDDEN = "***"
_MOST_OF_A_NAME = 40


class JobDirectory:
    """The directory of a job, created on construction, with the description of the job.

    The path is LOG_DIR/RUN_ID with --log-dir. Otherwise, a new directory is added to those listed by `paceline runs`,
    and the oldest of these directories are removed. If the directory cannot be created, `path` is None and the job runs
    without a directory. If another user's directory is the cause, `remark` contains a message for the user.

    Raises:
        SharedFileError: LOG_DIR/RUN_ID is a symbolic link or belongs to another user.
    """

    def __init__(self, job: Job) -> None:
        self.path: Path | None = None
        self.remark: str | None = None
        self._facts: dict[str, object] = {
            "job": job.run_id,
            "command": without_secrets(job.command.argv),
            "directory": "",
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "pid_started": linux.process_fields("self")[19],  # ticks since boot, to detect a reused pid
            "workers": job.workers,
            "elastic": job.elastic is not None,
            "variables": sorted(os.environ),
            "started_s": time.time(),
            "state": RunStatus.RUNNING.value,
        }
        with contextlib.suppress(OSError):  # the directory has been removed
            self._facts["directory"] = os.getcwd()
        if job.output.log_dir is not None:  # errors are raised, because the output requires the directory
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
        except OSError as error:
            if job.output.log_dir is None and os.environ.get(RUNS_DIRECTORY_VARIABLE):
                self.remark = (
                    f"`paceline runs` will not list this job, because the directory in {RUNS_DIRECTORY_VARIABLE} "
                    f"cannot be used: {error}"
                )

    def note(self, **facts: object) -> None:
        """Adds entries to the job's description."""
        self._facts.update(facts)
        self._write()

    def conclude(self, code: int, was_stopped: bool, offset: Offset | None) -> None:
        """Records the end of the job on this machine, and the clock offset to the rendezvous machine."""
        if offset is not None:
            self.note(clock=asdict(offset))
        state = RunStatus.STOPPED if was_stopped else RunStatus.FAILED if code else RunStatus.FINISHED
        self.note(state=state.value, exit_code=code, ended_s=time.time(), versions=_versions())

    def _write(self) -> None:
        if self.path is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not terminate the job
            written = self.path / f".{JOB_FILE}"
            written.write_text(json.dumps(self._facts, indent=1) + "\n")
            written.replace(self.path / JOB_FILE)


def without_secrets(argv: tuple[str, ...]) -> list[str]:
    """Returns a command's words, with `***` in place of the values of options whose names suggest secrets."""
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


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"paceline": __version__, "python": sys.version.split()[0], "kernel": platform.release()}
    with contextlib.suppress(PackageNotFoundError):
        versions["torch"] = version("torch")
    return versions


class Events:
    """Writes events to the job's directory (if any) and optionally to stderr; also calls `listener`."""

    def __init__(
        self,
        to_stderr: bool,
        run_id: str,
        console: Console,
        directory: Path | None = None,
        listener: EventListener | None = None,
    ) -> None:
        self._to_stderr = to_stderr
        self._run_id = run_id
        self._write_to_stderr = console.writer(2)
        self._file = None if directory is None else directory / EVENTS_FILE
        self._listener = listener

    def write(self, event: str, **facts: Fact) -> None:
        """Writes one event with its time, host and attributes."""
        if self._listener is not None:
            self._listener(event, facts)
        now_s, host = round(time.time(), 3), socket.gethostname()
        line = {"event": event, "time_s": now_s, "host": host, "run_id": self._run_id, **facts}
        text = json.dumps(line).encode() + b"\n"
        if self._to_stderr:
            self._write_to_stderr(text)
        if self._file is not None:
            with contextlib.suppress(OSError), open(append_to(str(self._file)), "ab") as file:
                file.write(text)


class RecordingMemory:
    """The memory that one worker records into. The launcher calls `release` after the worker has exited."""

    def __init__(self, recordings: JobRecordings, path: Path | None) -> None:
        self.fd = linux.memfd_create(MEMORY_NAME, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
        os.truncate(self.fd, layout.NBYTES)
        fcntl.fcntl(self.fd, linux.F_ADD_SEALS, _SEALS)
        self._recordings = recordings
        self._path = path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable that passes the memory to the worker."""
        return {HANDED_VARIABLE: str(HandedMemory(self.fd, os.fstat(self.fd).st_ino, os.getpid()))}

    def release(self) -> None:
        """Writes the worker's recording to disk, if there is one, and frees the memory; idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self._path is not None and os.pread(fd, 8, 0) == layout.MAGIC.to_bytes(8, "little"):
            self._recordings.write_out(fd, self._path)
        else:
            os.close(fd)


class JobRecordings:
    """The recordings of a job's workers on this machine."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._writer: ThreadPoolExecutor | None = None
        self._written: deque[Path] = deque()

    def new(self, attempt: int, rank: int) -> RecordingMemory | None:
        """Allocates a recording's memory; returns None if recording is disabled or no file descriptor is available."""
        if is_switched_off():
            return None
        directory = self._directory
        path = None if directory is None else directory / f"attempt_{attempt}" / str(rank) / RECORDING_FILE
        try:
            return RecordingMemory(self, path)
        except OSError:
            return None

    def write_out(self, fd: int, path: Path) -> None:
        """Writes an exited worker's memory `fd` to a file on a separate thread, and closes `fd`."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="paceline-recordings")
        self._writer.submit(self._write, fd, path)

    def close(self) -> None:
        """Waits for all writes to complete; idempotent."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _write(self, fd: int, path: Path) -> None:
        try:
            with contextlib.suppress(OSError):  # a full disk must not terminate the job
                path.parent.mkdir(parents=True, exist_ok=True)
                written = path.with_name(f".{path.name}")
                written.write_bytes(zlib.compress(os.pread(fd, layout.NBYTES, 0), _FAST))
                written.replace(path)
                self._written.append(path)
                if len(self._written) > _MOST_FILES:
                    self._written.popleft().unlink()
        finally:
            os.close(fd)
