"""Nothing outlives the launcher, whatever ends it.

The kernel kills a worker whose launcher dies (PR_SET_PDEATHSIG). What the worker itself had started is killed by the
guard: a process that was forked off early, holds the reading end of a pipe, and learns of the launcher's death by its
end. It then kills the workers' process groups and whatever carries the job's mark in its environment, and removes the
job's directory. Nothing else is killed: a process tree may hold what belongs to others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterable

MARK = "PACELINE_JOB"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 20  # of looking for what was started while the others were killed


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, its parent, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes the workers' children ours when the workers end, instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Iterable[int]) -> None:
    """Collects those adopted children that have ended; the statuses of `own` are left to those who wait for them."""
    spared = set(own)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in spared:
                return  # the others come to light when it is collected
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_group(leader: int, number: int) -> None:
    """Sends a signal to the process group of `leader`, if there is still one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def marked(mark: str) -> list[int]:
    """The running processes of this user whose environment had `mark` when they started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if wanted in environment.read():
                    found.append(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kills every process with `mark`, and what these start meanwhile."""
    for _ in range(_ROUNDS):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


class Guard:
    """The guarding process; make it before any thread is started. `close` when the job is over."""

    def __init__(self, directory: str, mark: str) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _keep_watch(reading, directory, mark)
            os._exit(0)
        os.close(reading)

    def watch(self, leaders: Iterable[int]) -> None:
        """Also guards these process groups."""
        with contextlib.suppress(BrokenPipeError):  # it was killed; the workers still end with their launcher
            os.write(self._writing, b"".join(b"%d\n" % leader for leader in leaders))

    def close(self) -> None:
        """Ends the guard; what is left of the process groups it guarded is killed."""
        os.close(self._writing)
        os.waitpid(self.pid, 0)


def _keep_watch(reading: int, directory: str, mark: str) -> None:
    os.setsid()  # a Ctrl-C in the terminal is not for the guard
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    while more := os.read(reading, 4096):
        told += more
    for leader in told.split():
        kill_group(int(leader), signal.SIGKILL)
    kill_marked(mark)
    shutil.rmtree(directory, ignore_errors=True)
