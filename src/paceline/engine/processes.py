"""What names a process among all that ever ran, and whether it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("Z", "X")
_STATE, _STARTED = 0, 19  # fields 3 and 22 of proc_pid_stat(5), counted from behind the name


@dataclass(frozen=True)
class Process:
    """A process: a number means something only in its PID namespace, and there only until it is used again.

    Args:
        namespace: of the host since it was booted, of its process numbers and of its clock.
        pid: the number there.
        started: when, in clock ticks of that namespace.
    """

    namespace: str
    pid: int
    started: int

    @staticmethod
    def mine() -> Process:
        """The calling process."""
        return Process(_namespace(), os.getpid(), int(_stat("self")[_STARTED]))

    def has_ended(self) -> bool | None:
        """Whether it has; None for one that cannot be judged from here, since it is in another namespace or on another
        host.
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
