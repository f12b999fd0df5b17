"""Cleanup of a job on this machine. No process or directory created by the job outlives the launcher.

The kernel kills a worker whose launcher dies (`paceline/linux.py`). Processes started by a worker are found in four
ways:

- If the kernel permits this user to create a cgroup, the job's cgroup contains every process started by a worker,
whatever its session, parent and environment. `cgroup.kill` (Linux 5.14) kills exactly these processes. This requires
cgroup version 2 and delegation to the user: by a systemd user manager, in a container with write access, or as root.
- All of the job's processes have its mark in their environment.
- A worker's processes are in the worker's session.
- The launcher adopts orphans, and kills them before it exits normally.

If the launcher is killed, guards kill the job's processes instead. Guards are processes that were forked early. Each
one reads from a pipe whose write end is closed when the launcher dies. Guards do not kill whole process trees, because
a process tree may contain other users' processes. There are several guards in case one of them is killed just before
the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline import _core
from paceline.linux import process_fields

CGROUP_VARIABLE = "PACELINE_CGROUP"  # the cgroup that a worker's bootstrap joins first

MARK = "PACELINE_JOB"
GUARDS = 3

_PAUSE_S = 0.005
_REMOVAL_ROUNDS = 200  # maximum number of pauses while waiting for killed processes in a cgroup to exit
_KILL_ROUNDS = 20  # maximum number of repetitions, to catch processes that are started in the meantime
_PR_SET_CHILD_SUBREAPER = 36
_NOT_FOR_GUARDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_PATH = 80  # limit of 107 bytes for a Unix socket's path, minus the file names in the directory


@dataclass(frozen=True)
class Cgroup:
    """A child cgroup of this process's own cgroup. The child cgroup may not exist yet."""

    directory: Path

    @classmethod
    def planned(cls, root: Path = Path("/")) -> Cgroup | None:
        """Returns a cgroup with a unique name without creating it, or None if this user cannot create cgroups."""
        own = own_directory(root)
        if own is None or not os.access(own, os.W_OK) or not os.access(own / "cgroup.procs", os.W_OK):
            return None
        return cls(own / f"paceline-{secrets.token_hex(8)}")

    def make(self) -> bool:
        """Creates the cgroup; returns False if the kernel denies this or lacks `cgroup.kill`."""
        try:
            self.directory.mkdir()
            if (self.directory / "cgroup.kill").exists():
                return True
            self.directory.rmdir()
        except OSError:
            pass
        return False

    def kill(self) -> None:
        """Kills every process in the cgroup and its descendants if the cgroup exists. The cgroup remains usable."""
        with contextlib.suppress(OSError):
            (self.directory / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Kills every process in the cgroup and removes the cgroup; idempotent."""
        for _ in range(_REMOVAL_ROUNDS):
            self.kill()
            for directory, _, _ in os.walk(self.directory, topdown=False):
                with contextlib.suppress(OSError):  # the cgroup is still in use
                    os.rmdir(directory)
            if not self.directory.exists():
                return
            time.sleep(_PAUSE_S)


def own_directory(root: Path = Path("/")) -> Path | None:
    """Returns the directory of this process's version 2 cgroup, or None if that hierarchy is not mounted."""
    directories, is_mounted_so = _core.cgroups("", str(root).rstrip("/"))
    return Path(directories[0]) if is_mounted_so else None


def reap_orphans(own: Iterable[int]) -> None:
    """Reaps adopted children that have exited, except `own`, whose owner reaps them."""
    spared = set(own)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in spared:
                return  # waitid reports the same child until its owner has reaped it
            os.waitpid(ended.si_pid, os.WNOHANG)


def _pids(matches: Callable[[int], bool]) -> list[int]:
    """Returns the processes for which `matches` returns True; `matches` may raise OSError if a process has exited."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if matches(int(name)):
                found.append(int(name))
    return found


def children() -> set[int]:
    """Returns this process's running children, including adopted ones."""
    me = str(os.getpid())

    def is_child(pid: int) -> bool:
        state, parent = process_fields(pid)[:2]
        return parent == me and state != "Z"

    return set(_pids(is_child))


def kill_orphans(own: Iterable[int]) -> None:
    """Kills every child of this process except `own`, and the grandchildren that are adopted as a result."""
    spared = set(own)
    for _ in range(_KILL_ROUNDS):
        orphans = children() - spared
        if not orphans:
            return
        _kill_processes(orphans)
        reap_orphans(spared)
        time.sleep(_PAUSE_S)


def _kill_processes(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(leader: int, number: int) -> None:
    """Sends a signal to the process group led by `leader`, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def marked(mark: str) -> list[int]:
    """Returns this user's running processes whose environment contained `mark` when they started."""
    entry, me = f"{MARK}={mark}".encode(), os.getpid()
    return _pids(lambda pid: pid != me and entry in Path(f"/proc/{pid}/environ").read_bytes())


def kill_marked(mark: str) -> None:
    """Kills every process with `mark`, and any processes that these start in the meantime."""
    for _ in range(_KILL_ROUNDS):
        pids = marked(mark)
        if not pids:
            return
        _kill_processes(pids)
        time.sleep(_PAUSE_S)


def kill_sessions(leaders: Iterable[int]) -> None:
    """Kills every process in sessions whose leader is or was in `leaders`."""
    sessions = set(leaders)
    _kill_processes(_pids(lambda pid: os.getsid(pid) in sessions))


class CleanupGuard:
    """The guard processes. Must be created before any thread starts, and closed after the job has ended."""

    def __init__(self, directory: str, mark: str, cgroup: Cgroup | None) -> None:
        self._writing: list[int] = []
        self.pids = [self._fork(directory, mark, cgroup) for _ in range(GUARDS)]

    def _fork(self, directory: str, mark: str, cgroup: Cgroup | None) -> int:
        reading, writing = os.pipe()
        self._writing.append(writing)
        # Python drops a Ctrl-C that arrives while `os.fork` runs fork hooks, such as those from `logging`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_GUARDS)
        try:
            pid = os.fork()
            if pid == 0:
                for inherited in self._writing:
                    os.close(inherited)
                _keep_watch(reading, directory, mark, cgroup)
                os._exit(0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        return pid

    def watch(self, leader: int) -> None:
        """Adds a worker's session to the guarded sessions."""
        self._send(b"%d " % leader)

    def forget(self) -> None:
        """Stops guarding all current sessions. Their leaders have exited, and the kernel may reuse the pids."""
        self._send(b"!")

    def _send(self, message: bytes) -> None:
        for writing in self._writing:
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                os.write(writing, message)

    def close(self) -> None:
        """Stops the guards, which first kill the job's remaining processes."""
        for writing in self._writing:
            os.close(writing)
        for pid in self.pids:
            os.waitpid(pid, 0)


def _keep_watch(reading: int, directory: str, mark: str, cgroup: Cgroup | None) -> None:
    os.setsid()  # protects the guard from Ctrl-C in the terminal
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


class Cleanup:
    """The job's private directory, cgroup (if possible), mark and guards. `close` removes all of them.

    Must be created before any thread starts.
    """

    def __init__(self) -> None:
        self.directory = _directory()
        # In a nested job, the mark begins with the outer job's mark, so that the end of the outer job also kills this
        # job.
        self._mark = f"{os.environ.get(MARK, '')}{secrets.token_hex(8)}."
        self._others = children()
        planned = Cgroup.planned()
        self._guard = CleanupGuard(self.directory, self._mark, planned)
        # The cgroup is created after the guards, because the guards remove it.
        self._cgroup = planned if planned is not None and planned.make() else None
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopts the children of workers that exit

    def variables(self, name: str) -> dict[str, str]:
        """Returns environment variables for workers; `name` distinguishes these workers from others in the job."""
        variables = {MARK: f"{self._mark}{name}."}
        if self._cgroup is not None:
            variables[CGROUP_VARIABLE] = str(self._cgroup.directory)
        return variables

    def watch(self, worker: int) -> None:
        """Instructs the guards to kill this worker's session if the launcher is killed."""
        self._guard.watch(worker)

    def reap(self, workers: Iterable[int]) -> None:
        """Reaps adopted processes that have exited, except `workers`, whose owner reaps them."""
        reap_orphans([*self._guard.pids, *workers])

    def end_generation(self, name: str) -> None:
        """Kills the remaining processes of the workers marked with `name`. All of these workers have exited."""
        self._guard.forget()
        if self._cgroup is not None:
            self._cgroup.kill()
        kill_marked(f"{self._mark}{name}.")
        kill_orphans([*self._others, *self._guard.pids])

    def end_worker(self, name: str, worker: int, others: Iterable[int]) -> None:
        """Kills the remaining processes of one exited worker marked with `name`. `others` are the running workers."""
        self._guard.forget()
        for other in others:
            self._guard.watch(other)
        kill_marked(f"{self._mark}{name}.")
        kill_sessions([worker])

    def close(self) -> None:
        """Kills the job's remaining processes, and removes its directory and cgroup."""
        self._guard.close()
        kill_marked(self._mark)
        kill_orphans(self._others)
        if self._cgroup is not None:
            self._cgroup.remove()
        reap_orphans([])
        shutil.rmtree(self.directory, ignore_errors=True)


def _directory() -> str:
    """Creates the job's directory. The path is short enough for Unix sockets."""
    directory = tempfile.mkdtemp(prefix="paceline-")
    if len(os.fsencode(directory)) <= _LONGEST_PATH:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
