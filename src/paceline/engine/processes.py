"""Identifies a process uniquely among all that have ever run, and tells whether it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("Z", "X")
_STATE, _STARTED = 0, 19  # fields 3 and 22 of proc_pid_stat(5), as indices into the fields after the name


@dataclass(frozen=True)
class Process:
    """A process, identified by more than its pid: a pid is valid only in its PID namespace, and the kernel reuses it.

    Args:
        namespace: identifies the boot of the host, the PID namespace and the time namespace.
        pid: the process id in that namespace.
        started: the time at which the process started, in clock ticks of that namespace.
    """

    namespace: str
    pid: int
    started: int

    @staticmethod
    def mine() -> Process:
        """Returns the calling process."""
        return Process(_namespace(), os.getpid(), int(_stat("self")[_STARTED]))

    @staticmethod
    def of(pid: int) -> Process:
        """Returns the process with this id here.

        Raises:
            ProcessLookupError: there is none.
        """
        try:
            return Process(_namespace(), pid, int(_stat(str(pid))[_STARTED]))
        except FileNotFoundError:
            raise ProcessLookupError(f"process {pid} has ended") from None

    def has_ended(self) -> bool | None:
        """Returns whether the process has ended.

        Returns None if that cannot be seen from here, because the process is in another namespace or on another host.
        """
        # Under `unshare --pid` without a /proc of its own, /proc shows the processes of another namespace.
        if self.namespace != _namespace() or os.readlink("/proc/self") != str(os.getpid()):
            return None
        try:
            stat = _stat(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat[_STATE] in _ENDED or int(stat[_STARTED]) != self.started


def _stat(process: str) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    clock = Path("/proc/self/ns/time")
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{clock.stat().st_ino if clock.exists() else 0}"
