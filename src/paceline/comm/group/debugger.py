"""`breakpoint`, which opens the debugger pdb on one rank while the other ranks wait."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

from paceline.comm.group.default import raise_timeouts, resolve

_calls: Counter[tuple[str, int]] = Counter()


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Opens the debugger pdb on one rank at the line of this call, while all other ranks wait in the same call.

    The other ranks wait without a timeout until the user enters `continue` or, after `next` or `step`, until the
    debugged rank reaches its next collective. If the debugged rank exits, the other ranks immediately raise an error.
    Under `paceline run` the debugger uses the launcher's terminal, regardless of the rank. Ctrl-C at the prompt raises
    KeyboardInterrupt in the debugger and does not terminate the job.

    Args:
        rank: the rank to debug, in the default group.
        skip: the number of calls from the same line to ignore before the debugger opens.
        timeout_s: the minimum timeout of all groups, in seconds. Shorter timeouts are permanently raised to this value,
            because the other ranks wait in their next collective while the user steps through the debugged rank. None
            leaves the timeouts unchanged.

    Raises:
        ValueError: there is no default group, or it has no such rank.
        RuntimeError: the debugged rank has no standard input from which to read commands.
    """
    group = resolve(None)
    assert group is not None
    if not 0 <= rank < group.size():
        raise ValueError(f"breakpoint: rank {rank} is not in the default group of {group.size()} ranks")
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    _calls[place] += 1
    if _calls[place] <= skip:
        return
    if timeout_s is not None:
        raise_timeouts(timeout_s)
    if group.rank() == rank:
        _require_input(rank)
        _debug(_Debugger(caller))
    group.barrier(timeout=timedelta.max)


def _debug(debugger: _Debugger) -> None:
    debugger.set_trace()
    return  # a line at which the debugger can stop


class _Debugger(pdb.Pdb):
    """pdb on the terminal. It stops inside `breakpoint`, but initially shows the caller's frame.

    Because it stops inside `breakpoint`, the debugger finishes before the other ranks continue. With `nosigint`, Ctrl-C
    after `continue` terminates the job, as without a debugger.
    """

    def __init__(self, caller: FrameType) -> None:
        super().__init__(nosigint=True)
        self._caller: FrameType | None = caller

    def interaction(self, frame: FrameType | None, *rest: TracebackType | None) -> None:
        frame, self._caller = self._caller or frame, None
        self.skip = {__name__}
        with _typing():
            super().interaction(frame, *rest)


@contextlib.contextmanager
def _typing() -> Iterator[None]:
    """Connects the standard streams to the terminal, and marks this process as the target of Ctrl-C."""
    error_file = os.environ.get("PACELINE_ERROR_FILE")
    marker = Path(f"{error_file}.debugger") if error_file else None
    with contextlib.ExitStack() as undo:
        if marker is not None and marker.parent.is_dir():
            marker.touch()
            undo.callback(marker.unlink, missing_ok=True)
        path = os.environ.get("PACELINE_TERMINAL")
        if path and not (os.isatty(0) and os.isatty(1)):
            undo.enter_context(_standard_streams(path))
        if not _reads_descriptor_0():
            undo.enter_context(_stdin_from_descriptor_0())
        yield


@contextlib.contextmanager
def _standard_streams(path: str) -> Iterator[None]:
    """Opens the terminal at `path` as file descriptors 0 to 2."""
    before = [os.dup(fd) for fd in range(3)]
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    try:
        _replace([terminal] * 3)
        yield
    finally:
        _replace(before)
        for fd in (terminal, *before):
            os.close(fd)


def _replace(descriptors: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for fd, own in zip(descriptors, range(3), strict=True):
        os.dup2(fd, own)


def _reads_descriptor_0() -> bool:
    try:
        return sys.stdin.fileno() == 0
    except (AttributeError, OSError, ValueError):  # stdin is missing or closed, or is not a file
        return False


@contextlib.contextmanager
def _stdin_from_descriptor_0() -> Iterator[None]:
    """Replaces `sys.stdin`, because multiprocessing opens it as an empty file even if there is a terminal."""
    before = sys.stdin
    with open(0, closefd=False) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = before


def _require_input(rank: int) -> None:
    if os.environ.get("PACELINE_TERMINAL"):
        return
    try:
        is_empty = os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:  # descriptor 0 is closed
        is_empty = True
    if is_empty:
        raise RuntimeError(
            f"breakpoint: rank {rank} has no terminal and its stdin is empty, so the debugger cannot read any input; "
            f"start the job from a terminal, or with `paceline run --stdin {rank}`"
        )
