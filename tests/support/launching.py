"""Runs `paceline run` as a person does, and looks after its processes; `script("...")` writes what it is to run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import left_behind  # noqa: F401  # changes the environment that is copied below
import pytest

_OF_A_JOB = ("OMP_NUM_THREADS", "PACELINE_SECRET", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE", "PACELINE_STORE")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}


# A line for scripts that need nothing but a rendezvous. The launcher, which reads the script, does not recognize the
# import, and therefore does not import torch before it forks workers, which takes longer than the rest.
MEET = 'rendezvous = __import__("paceline.comm.rendezvous.rendezvous", fromlist=["rendezvous"]).rendezvous'


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a text into a file of its own directory and returns the file's path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "run", *arguments]


def run(
    *arguments: str, timeout_s: float = 110, env: dict[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to the end; on a timeout the launcher is killed, which ends all that it had started."""
    environment = {**(ENVIRONMENT if env is None else env), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=cwd
    )


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Fails if the condition does not come true; the time is for a busy machine, and costs only where it fails."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """The running processes, zombies aside, in whose environment `mark` stood when they were started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (directory / "environ").read_bytes() and is_alive(int(directory.name)):
                found.append(int(directory.name))
    return found


def processes_in(directory: Path) -> list[int]:
    """The running processes, zombies aside, whose working directory it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").samefile(directory) and is_alive(int(process.name)):
                found.append(int(process.name))
    return found


def state_of(pid: int) -> str:
    """The letter of a process's or thread's state: S if it sleeps, T if it is stopped; Z if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def sleep_for_a_while(*pids: int) -> bool:
    """Whether these processes or threads wait for something, or have ended, whenever they are looked at."""
    for _ in range(10):
        if not all(state_of(pid) in "SZ" for pid in pids):
            return False
        time.sleep(0.01)
    return True


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
