"""Finds out whether the kernel killed a worker because memory ran out, from its cgroup's counter or the kernel log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline import _core

_GIB = 1 << 30
_NO_LIMIT = 1 << 60  # without a limit version 1 reports a number near 2^63


@dataclass(frozen=True)
class MemoryCgroup:
    """The cgroup that limits this process's memory; `directory` is None if none can be read."""

    directory: Path | None

    @classmethod
    def mine(cls, root: Path = Path("/")) -> MemoryCgroup:
        """Returns this process's cgroup, or the next one around it that can be read; in a container only one may be."""
        directories, _ = _core.cgroups("memory", str(root).rstrip("/"))
        for directory in map(Path, directories):
            if (directory / "memory.events").exists() or (directory / "memory.oom_control").exists():
                return cls(directory)
        return cls(None)

    def kills(self) -> int:
        """Returns how many processes of this cgroup the kernel has killed because memory ran out."""
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", self._read(name), re.MULTILINE)
            if found:
                return int(found[1])
        return 0

    def limit(self) -> int | None:
        """Returns the limit in bytes; None if there is none."""
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
    """Reports for each killed worker whether memory was the reason."""

    def __init__(self, cgroup: MemoryCgroup | None = None) -> None:
        self._cgroup = MemoryCgroup.mine() if cgroup is None else cgroup
        self._reported = self._cgroup.kills()

    def explain(self, pid: int, peak_bytes: int | None) -> str | None:
        """Returns a sentence with the figures if the kernel killed `pid` because memory ran out, otherwise None."""
        kills = self._cgroup.kills()
        if kills > self._reported:
            self._reported += 1
        elif not _kernel_log_names(pid):
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


def _kernel_log_names(pid: int) -> bool:
    """Returns whether the kernel log, if this user may read it, says that the kernel killed this process."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    wanted = re.compile(rb"[Kk]illed process %d " % pid)
    try:
        while True:
            try:
                if wanted.search(os.read(log, 8192)):
                    return True
            except BrokenPipeError:
                continue  # this record was overwritten meanwhile
            except OSError:
                return False  # at its end
    finally:
        os.close(log)
