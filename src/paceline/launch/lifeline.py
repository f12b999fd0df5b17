"""Makes sure that nothing outlives the launcher, whatever ends it.

The kernel kills a worker whose launcher dies (`paceline/parent.py`). Guards kill what a worker had started: they are
processes that were forked early and hold the reading end of a pipe, which closes when the launcher dies. They kill the
job's cgroup if there is one, and every process that carries the job's mark in its environment or is in a session that a
worker leads, and they remove the job's directory. They kill nothing else, since a process tree may hold processes that
belong to others. There are several guards, since one may be killed just before the launcher.

A launcher that ends by itself also kills the orphans that it has adopted: they are processes of the job, whatever they
did to their environment and session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterable

from paceline.launch.cgroup import Cgroup

MARK = "PACELINE_JOB"
GUARDS = 3

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 20  # how often to look again for processes that were started during the killing
_NOT_FOR_GUARDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def adopt_orphans() -> None:
    """Makes this process, instead of init, the parent of the workers' children when the workers end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Iterable[int]) -> None:
    """Reaps the adopted children that have ended; leaves `own` to the code that waits for them."""
    spared = set(own)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in spared:
                return  # waitid reports one child at a time; the owner of this one must reap it first
            os.waitpid(ended.si_pid, os.WNOHANG)


def children() -> set[int]:
    """Returns the running children of this process, including adopted ones."""
    me = os.getpid()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as status:
                state, parent = status.read().rpartition(b")")[2].split()[:2]
                if int(parent) == me and state != b"Z":
                    found.add(int(name))
    return found


def kill_orphans(own: Iterable[int]) -> None:
    """Kills every child of this process except `own`, and their children, which this process adopts."""
    spared = set(own)
    for _ in range(_ROUNDS):
        orphans = children() - spared
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(spared)
        time.sleep(0.005)


def kill_group(leader: int, number: int) -> None:
    """Sends a signal to the process group of `leader`, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def marked(mark: str) -> list[int]:
    """Returns the running processes of this user whose environment had `mark` when they started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if wanted in environment.read():
                    found.append(int(name))
    return found


def kill_marked(mark: str) -> None:
    """Kills every process with `mark`, and what these processes start in the meantime."""
    for _ in range(_ROUNDS):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def in_sessions(leaders: Iterable[int]) -> list[int]:
    """Returns the running processes of the sessions that `leaders` lead or led."""
    wanted = set(leaders)
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) in wanted:
                    found.append(int(name))
    return found


def kill_sessions(leaders: Iterable[int]) -> None:
    """Kills every process of the sessions that `leaders` lead or led."""
    for pid in in_sessions(leaders):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Guard:
    """The guarding processes. Create it before any thread starts, and `close` it when the job is over."""

    def __init__(self, directory: str, mark: str, cgroup: Cgroup | None) -> None:
        self._writing: list[int] = []
        self.pids = [self._fork(directory, mark, cgroup) for _ in range(GUARDS)]

    def _fork(self, directory: str, mark: str, cgroup: Cgroup | None) -> int:
        reading, writing = os.pipe()
        self._writing.append(writing)
        # Python drops a Ctrl-C that comes while `os.fork` calls hooks, such as those of `logging`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_GUARDS)
        try:
            pid = os.fork()
            if pid == 0:
                for each in self._writing:
                    os.close(each)
                _keep_watch(reading, directory, mark, cgroup)
                os._exit(0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        return pid

    def watch(self, leader: int) -> None:
        """Also guards the session of this worker."""
        self._tell(b"%d " % leader)

    def forget(self) -> None:
        """Stops guarding the sessions of the workers so far: they have exited, and the kernel may reuse their pids."""
        self._tell(b"!")

    def _tell(self, message: bytes) -> None:
        for writing in self._writing:
            with contextlib.suppress(BrokenPipeError):  # this one was killed
                os.write(writing, message)

    def close(self) -> None:
        """Ends the guards, which first kill what is left of the job."""
        for writing in self._writing:
            os.close(writing)
        for pid in self.pids:
            os.waitpid(pid, 0)


def _keep_watch(reading: int, directory: str, mark: str, cgroup: Cgroup | None) -> None:
    os.setsid()  # a Ctrl-C in the terminal is not for the guard
    for number in _NOT_FOR_GUARDS:
        signal.signal(number, signal.SIG_IGN)
    received = b""
    while more := os.read(reading, 1 << 16):
        received = (received + more).rpartition(b"!")[2] if b"!" in more else received + more
    if cgroup is not None:
        cgroup.kill()
    kill_marked(mark)
    kill_sessions(map(int, received.split()))
    shutil.rmtree(directory, ignore_errors=True)
    if cgroup is not None:
        cgroup.remove()
