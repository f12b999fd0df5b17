"""Recorder for this process, which starts the recording and records the process's rank, groups and exit.

The recorder is enabled unless PACELINE_RECORD is "off". It starts when the process creates its first group or span.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

from paceline import _core
from paceline.comm.record.layout import FORMATION, OUTCOMES, REDUCTIONS
from paceline.comm.record.memory import handed_memory, is_switched_off, own_memory
from paceline.errors import RendezvousError, RendezvousTimeoutError, user_file_name

_WORKER_VARIABLE = "PACELINE_WORKER"
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE_FILE = "/proc/self/ns/time"

_FORMATION_ENGINE = "formation"  # not the group's engine, so that readers do not find a second group
_CODES = {outcome: code for code, outcome in OUTCOMES.items()}

_has_tried = False
_rank: int | None = None


def begin() -> None:
    """Starts the recording unless it has already started or is disabled."""
    global _has_tried
    _has_tried = True
    if _core.is_recording() or is_switched_off():
        return
    _core.name_user_files_by(user_file_name)
    identity = (os.environ.get(_WORKER_VARIABLE, ""), socket.gethostname(), _boot_id(), _time_namespace())
    with contextlib.suppress(OSError), handed_memory() as fd:  # training continues if the recording cannot start
        if fd is not None and _core.begin_recording(fd, *identity):
            return
    with contextlib.suppress(OSError), own_memory() as fd:
        _core.begin_recording(fd, *identity)


def begin_once() -> None:
    """Starts the recording unless this process, or the process that forked it, has already tried to start it."""
    if not _has_tried:
        begin()


def identify(rank: int, world_size: int) -> None:
    """Records this process's rank and the world size."""
    global _rank
    _rank = rank
    _core.identify_recording(rank, world_size)


def identify_once(rank: int, world_size: int) -> None:
    """Records this process's rank and the world size unless they have been recorded."""
    if _rank is None:
        identify(rank, world_size)


def known_rank() -> int | None:
    """Returns this process's rank, or None if no rank has been recorded yet."""
    return _rank


def open_group(name: str, engine: str, identity: int, rank: int, ranks: Sequence[int]) -> int:
    """Records a group; returns the serial number for its calls in the recording, or 0 if recording is disabled.

    Args:
        name: the group's name; "" denotes the default group.
        engine: the name of the engine that runs its calls.
        identity: a number that is the same on all members.
        rank: this process's rank in the group.
        ranks: the members' ranks in the default group, by group rank.
    """
    return _core.record_group(name or "default", engine, identity, rank, ranks)


def close_group(serial: int) -> None:
    """Records that a group has been closed."""
    _core.record_group_closed(serial)


@contextlib.contextmanager
def recorded_formation(name: str, identity: int, rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Records the formation of a group as the call `new_group`, so that a diagnosis finds the ranks that wait in it.

    Args:
        name, identity, rank, ranks: the group, as in `open_group`.
    """
    begin()
    serial = open_group(name, _FORMATION_ENGINE, identity, rank, ranks)
    call = _core.RecordedCall(serial, FORMATION, 0, len(REDUCTIONS), 0, 0, -1, False, -1)
    outcome = "interrupted"
    try:
        yield
        outcome = "ok"
    except RendezvousTimeoutError:
        outcome = "timed_out"
        raise
    except RendezvousError:
        outcome = "peer_lost"
        raise
    finally:
        call.end(_CODES[outcome])
        close_group(serial)


def _boot_id() -> str:
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
