"""Nothing outlives the launcher, whatever ends it.

The kernel kills a worker whose launcher dies (PR_SET_PDEATHSIG). What the worker itself had started is killed by the
guard: a process that was forked off early, holds the reading end of a pipe, and learns of the launcher's death by its
end. It then kills the workers' process groups and removes the job's directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, its parent, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(leader: int, number: int) -> None:
    """Sends a signal to the process group of `leader`, if there is still one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


class Guard:
    """The guarding process; make it before any thread is started. `close` when the job is over."""

    def __init__(self, directory: str) -> None:
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writing)
            _keep_watch(reading, directory)
            os._exit(0)
        os.close(reading)

    def watch(self, leaders: Iterable[int]) -> None:
        """Also guards these process groups."""
        os.write(self._writing, b"".join(b"%d\n" % leader for leader in leaders))

    def close(self) -> None:
        """Ends the guard; what is left of the process groups it guarded is killed."""
        os.close(self._writing)
        os.waitpid(self._pid, 0)


def _keep_watch(reading: int, directory: str) -> None:
    os.setsid()  # a Ctrl-C in the terminal is not for the guard
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    while more := os.read(reading, 4096):
        told += more
    for leader in told.split():
        kill_group(int(leader), signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
