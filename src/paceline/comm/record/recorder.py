"""Begins this process's recording, and says what the process is: its rank, its groups, its end.

The recorder is on unless PACELINE_RECORD is "off". It begins with the process's first group, or with its first span.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Sequence

from paceline import _core
from paceline.comm.record.memory import handed_memory, is_switched_off, own_memory

_WORKER_VARIABLE = "PACELINE_WORKER"
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE_FILE = "/proc/self/ns/time"

_has_tried = False
_rank: int | None = None


def begin() -> None:
    """Begins to record, unless this process does so already or must not."""
    global _has_tried
    _has_tried = True
    if _core.is_recording() or is_switched_off():
        return
    identity = (os.environ.get(_WORKER_VARIABLE, ""), socket.gethostname(), _boot(), _time_namespace())
    with contextlib.suppress(OSError), handed_memory() as fd:  # what cannot be mapped is no reason to fail
        if fd is not None and _core.begin_recording(fd, *identity):
            return
    with contextlib.suppress(OSError), own_memory() as fd:
        _core.begin_recording(fd, *identity)


def begin_once() -> None:
    """Begins to record unless that was tried before: a forked child does not begin by itself what its parent does."""
    if not _has_tried:
        begin()


def identify(rank: int, world_size: int) -> None:
    """Notes that this process is that rank of so many."""
    global _rank
    _rank = rank
    _core.identify_recording(rank, world_size)


def identify_once(rank: int, world_size: int) -> None:
    """Notes what this process is unless that is known already."""
    if _rank is None:
        identify(rank, world_size)


def known_rank() -> int | None:
    """Returns this process's rank, None before it has one."""
    return _rank


def open_group(name: str, engine: str, identity: int, rank: int, ranks: Sequence[int]) -> int:
    """Adds a group, by whose serial its calls are recorded; returns 0 where nothing is recorded.

    Args:
        name: the group's name; "" stands for the default group.
        engine: the name of the engine that runs its calls.
        identity: the same on all members.
        rank: this process's rank in the group.
        ranks: the members' ranks in the default group, by group rank.
    """
    return _core.record_group(name or "default", engine, identity, rank, ranks)


def close_group(serial: int) -> None:
    """Notes that the group has ended."""
    _core.record_group_closed(serial)


def _boot() -> str:
    with contextlib.suppress(OSError), open(_BOOT_FILE) as file:
        return file.read().strip()
    return ""


def _time_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat(_TIME_NAMESPACE_FILE).st_ino
    return 0


def _forget_in_child() -> None:
    global _rank
    _rank = None


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_core.finish_recording)
