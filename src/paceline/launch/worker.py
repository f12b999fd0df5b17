"""One worker process: its arguments, and its exit code and memory once it has ended."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from dataclasses import dataclass

from paceline.launch.job import Command, Kind
from paceline.launch.kept_memory import KeptMemory
from paceline.launch.lifeline import kill_group
from paceline.launch.placement import Cores
from paceline.system_calls import pidfd_open

_FLAG = {Kind.SCRIPT: [], Kind.MODULE: ["-m"], Kind.PATH: ["--path"], Kind.PROGRAM: ["--exec"]}

_NO_PIDFDS = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # an old kernel, or a sandbox that does not know the call
_ADOPTION_S = 0.02


def bootstrap_argv(command: Command, local_rank: int) -> list[str]:
    """Returns the arguments with which the bootstrap runs the command."""
    program, *arguments = command.argv
    if command.passes_local_rank:
        arguments = [f"--local_rank={local_rank}", *arguments]
    return [*_FLAG[command.kind], program, *arguments]


@dataclass
class Worker:
    """A running worker; `exit_code` is as in subprocess once it has ended."""

    rank: int
    local_rank: int
    pid: int
    error_file: str
    pidfd: int  # of `watch_end`
    log: str | None = None
    reads: bool = False  # whether it reads the launcher's stdin
    memory: KeptMemory | None = None  # what it records into
    exit_code: int | None = None
    peak_bytes: int | None = None

    @property
    def debugger_file(self) -> str:
        """Exists while the worker is in `paceline.breakpoint`."""
        return f"{self.error_file}.debugger"

    def collect(self) -> int:
        """Reaps the ended worker: stores its exit code, which it returns, and its peak memory; keeps its recording."""
        os.close(self.pidfd)
        try:
            _, status, usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            self.peak_bytes = usage.ru_maxrss * 1024
        except ChildProcessError:  # somebody else in this process waited for it
            self.exit_code = 0
        if self.memory is not None:
            self.memory.release()
        return self.exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and to what it started in its process group."""
        kill_group(self.pid, number)


def watch_end(pid: int) -> int:
    """Returns a descriptor that can be read when a child of this process, present or about to be adopted, has ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: there are no descriptors left.
    """
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PIDFDS:
            raise
    reading, writing = os.pipe()
    threading.Thread(target=_close_at_end, args=(pid, writing), name=f"paceline-end-of-{pid}", daemon=True).start()
    return reading


def _close_at_end(pid: int, writing: int) -> None:
    """Waits for a child without reaping it, then closes the writing end of the pipe whose other end is watched."""
    try:
        while os.path.exists(f"/proc/{pid}"):
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                return
            except ChildProcessError:  # it is not adopted yet
                time.sleep(_ADOPTION_S)
    finally:
        os.close(writing)


def allow_descriptors(workers: int) -> tuple[int, int] | None:
    """Raises the launcher's descriptor limit to what so many workers need; returns the old limit if it was too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 8 * workers + 256
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    return soft, hard


def place(pid: int, cores: Cores | None, descriptors: tuple[int, int] | None) -> None:
    """Binds a process to its cores and limits its descriptors; what it starts from then on inherits both."""
    with contextlib.suppress(OSError):  # it has ended already, or the cores were taken away
        if cores is not None:
            os.sched_setaffinity(pid, cores)
        if descriptors is not None:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, descriptors)
