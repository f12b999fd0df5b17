"""Asks the kernel, through /proc, what processes do. The processes themselves need not help, nor be able to."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.observe.evidence import Process, State

_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {"R": State.RUNS, "D": State.WAITS_FOR_DISK, "T": State.STOPPED, "t": State.TRACED}
_ENDED = "ZXx"
_SWAPPING_FAULTS_S = 50.0  # so many pages a second come from the disk only where memory is short
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Sample:
    """A process at one moment; the counters include those of its children."""

    at_s: float
    letter: str
    cpu_s: float
    disk_bytes: int
    major_faults: int
    swapped_kib: int
    ready_s: float  # how long main threads were ready to run and had no core
    is_frozen: bool


def sample(pid: int, root: Path = Path("/proc")) -> Sample | None:
    """Returns the process as it is now; None if there is none."""
    fields = _stat(root, pid)
    if not fields:
        return None
    cpu_ticks, disk_bytes, ready_s = 0, 0, 0.0
    for member in [pid, *_descendants(root, pid)]:
        own = _stat(root, member)
        cpu_ticks += sum(map(int, own[11:15])) if own else 0
        disk_bytes += _disk_bytes(root, member)
        ready_s += _ready_s(root, member)
    return Sample(
        time.monotonic(),
        fields[0],
        cpu_ticks / _TICKS,
        disk_bytes,
        int(fields[9]),
        _number(_read(root / str(pid) / "status"), "VmSwap:"),
        ready_s,
        _is_frozen(root, pid),
    )


def between(first: Sample | None, last: Sample | None) -> Process:
    """Returns what a process did between two samples."""
    if first is None or last is None or last.letter in _ENDED:
        return Process(State.ENDED)
    seconds = max(last.at_s - first.at_s, 1e-3)
    cores = max(0.0, (last.cpu_s - first.cpu_s) / seconds)
    state = _STATES.get(last.letter, State.SLEEPS)
    faults = (last.major_faults - first.major_faults) / seconds
    if last.is_frozen:
        state = State.FROZEN
    elif last.swapped_kib and faults > _SWAPPING_FAULTS_S and cores < 0.5:
        state = State.SWAPS
    disk = max(0.0, (last.disk_bytes - first.disk_bytes) / seconds)
    return Process(state, cores, disk, min(1.0, max(0.0, (last.ready_s - first.ready_s) / seconds)))


def threads(pid: int, root: Path = Path("/proc")) -> list[int]:
    """Returns the kernel's numbers of a process's threads but the main one."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir(root / str(pid) / "task") if int(name) != pid)
    return []


def _stat(root: Path, pid: int) -> list[str]:
    """Returns the fields of `stat` from the state on; empty if there is no such process."""
    return _read(root / str(pid) / "stat").rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _descendants(root: Path, pid: int) -> list[int]:
    found: list[int] = []
    for task in [pid, *threads(pid, root)]:
        for child in map(int, _read(root / str(pid) / "task" / str(task) / "children").split()):
            found += [child, *_descendants(root, child)]
    return found


def _disk_bytes(root: Path, pid: int) -> int:
    text = _read(root / str(pid) / "io")
    return _number(text, "read_bytes:") + _number(text, "write_bytes:")


def _number(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def _ready_s(root: Path, pid: int) -> float:
    fields = _read(root / str(pid) / "schedstat").split()
    return int(fields[1]) * 1e-9 if len(fields) > 1 else 0.0


def _is_frozen(root: Path, pid: int) -> bool:
    own = next((line[3:] for line in _read(root / str(pid) / "cgroup").splitlines() if line.startswith("0::")), None)
    return own is not None and "frozen 1" in _read(_CGROUPS / own.lstrip("/") / "cgroup.events")
