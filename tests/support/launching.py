"""Runs `paceline run` as users do, and inspects its processes; `script("...")` writes the script to run."""

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


# The import line for scripts that need only a rendezvous. The launcher does not recognize this import when it parses
# the script, so it does not import torch before it forks workers. Importing torch would take most of the time.
MEET = 'rendezvous = __import__("paceline.comm.rendezvous.rendezvous", fromlist=["rendezvous"]).rendezvous'


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes `text` to a file in a new directory and returns the path."""

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
    """Runs the launcher and waits for its exit. On a timeout, kills it, which also ends its child processes."""
    environment = {**(ENVIRONMENT if env is None else env), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=cwd
    )


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Fails if the condition does not become true in time. The timeout allows for a busy machine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """Returns the running processes whose initial environment contains `mark`, except zombies."""
    return _running(lambda process: mark.encode() in (process / "environ").read_bytes())


def processes_in(directory: Path) -> list[int]:
    """Returns the running processes that have this working directory, except zombies."""
    return _running(lambda process: (process / "cwd").samefile(directory))


def _running(is_wanted: Callable[[Path], bool]) -> list[int]:
    """Returns the running processes whose folder in /proc satisfies `is_wanted`, except zombies."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if is_wanted(process) and is_alive(int(process.name)):
                found.append(int(process.name))
    return found


def state_of(pid: int) -> str:
    """Returns the state of a process or thread as a letter: S for sleeping, T for stopped, Z if it has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def sleep_for_a_while(*pids: int) -> bool:
    """Checks these processes or threads for some time; returns True if they were always asleep or had exited."""
    for _ in range(10):
        if not all(state_of(pid) in "SZ" for pid in pids):
            return False
        time.sleep(0.01)
    return True


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
