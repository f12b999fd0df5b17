"""How much memory a launcher may still take: what the machine has left, and what the limits of its cgroups leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Names:
    """Where a version of cgroups says what a cgroup may take, what it takes, and what of that can be given back."""

    base: str
    limit: str
    usage: str
    reclaimable: str


_FIRST = _Names("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Names("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_nbytes(root: Path = Path("/")) -> int:
    """Returns how many bytes of memory this process may still take; `root` is that of the file system."""
    with open(root / "proc/meminfo") as lines:
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([machine, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yields what the limit of each cgroup leaves in which this process is; those without a limit are left out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        names = _SECOND if number == "0" else _FIRST if "memory" in controllers.split(",") else None
        if names is None:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):  # in a container, only the last one may be there, and be its own
            left = _left(root / names.base / each, names)
            if left is not None:
                yield left


def _left(directory: Path, names: _Names) -> int | None:
    try:
        limit, usage = (int((directory / name).read_text()) for name in (names.limit, names.usage))
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(names.reclaimable, 0))
    except (OSError, ValueError):  # there is no such cgroup, or it says "max"
        return None
