"""Detection of workers killed by the kernel's out-of-memory killer, using the cgroup's counter or the kernel log."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline import _core

_GIB = 1 << 30
_KILLED = re.compile(rb"[Kk]illed process (\d+) ")
_NO_LIMIT = 1 << 60  # cgroup version 1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True)
class MemoryCgroup:
    """The cgroup that limits this process's memory; `directory` is None if no cgroup is readable."""

    directory: Path | None

    @classmethod
    def mine(cls, root: Path = Path("/")) -> MemoryCgroup:
        """Returns this process's innermost readable cgroup. A container may expose only one."""
        directories, _ = _core.cgroups("memory", str(root).rstrip("/"))
        for directory in map(Path, directories):
            if (directory / "memory.events").exists() or (directory / "memory.oom_control").exists():
                return cls(directory)
        return cls(None)

    def kills(self) -> int:
        """Returns the number of processes in this cgroup that the out-of-memory killer has killed."""
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", self._read(name), re.MULTILINE)
            if found:
                return int(found[1])
        return 0

    def limit(self) -> int | None:
        """Returns the memory limit in bytes, or None if there is no limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = self._read(name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                return int(text)
        return None

    def _read(self, name: str) -> str:
        try:
            return "" if self.directory is None else (self.directory / name).read_text()
        except OSError:
            return ""


class MemoryWatch:
    """Determines whether the out-of-memory killer killed a worker."""

    def __init__(self, cgroup: MemoryCgroup | None = None, log: str = "/dev/kmsg") -> None:
        self._cgroup = MemoryCgroup.mine() if cgroup is None else cgroup
        self._reported = self._cgroup.kills()
        self._log = _KernelLog(log)

    @property
    def has_more(self) -> bool:
        """Whether the kernel has killed processes in the cgroup that are not accounted for yet."""
        return self._cgroup.kills() > self._reported

    def close(self) -> None:
        """Closes the kernel log; idempotent."""
        self._log.close()

    def explain(self, pid: int, peak_bytes: int | None) -> str | None:
        """Returns a sentence with memory statistics if the out-of-memory killer killed `pid`, otherwise None."""
        kills = self._cgroup.kills()
        if kills > self._reported:
            self._reported += 1
        elif not self._log.names(pid):
            return None
        used = f"it had used up to {_size(peak_bytes)}" if peak_bytes else "it used too much memory"
        limit = self._cgroup.limit()
        bound = f"the cgroup's limit is {_size(limit)}" if limit is not None else f"the machine has {_size(_total())}"
        return (
            f"{used}; {bound} for all ranks together. Take smaller batches, fewer DataLoader workers or fewer ranks, "
            "or raise the limit"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / (1 << 20):.0f} MiB"


def _total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _KernelLog:
    """The processes that the kernel log has reported as killed since creation, if this user may read the log."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._killed: set[int] = set()
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)  # skips older records; reading the whole log would delay a diagnosis

    def names(self, pid: int) -> bool:
        """Returns whether the log reports that the kernel killed this process."""
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:
                continue  # the record was overwritten
            except OSError:
                break  # end of the log
            self._killed.update(map(int, _KILLED.findall(record)))
            if not record:
                break
        return pid in self._killed

    def close(self) -> None:
        """Closes the log; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
