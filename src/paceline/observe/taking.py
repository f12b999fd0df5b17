"""Takes a worker's Python stack without its help, also while it is stuck in native code.

At its start, a worker of `paceline run` has faulthandler answer a real-time signal with the stack of the thread that
receives it, written into a memory file. The launcher finds that file through /proc. The signal would kill a process
that has no handler for it; so it is sent only to one that does, and never to a worker's children. Only the thread that
receives the signal is written down: to walk the frames of a thread that runs could crash the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence

from paceline.observe import stacks
from paceline.observe.evidence import Frame
from paceline.observe.processes import threads
from paceline.system_calls import pidfd_open, pidfd_send_signal

SIGNAL = signal.SIGRTMAX - 7  # programs rarely use it; `launch/bootstrap.py` names it too
FILE = "paceline-stack"  # and the process's number, since a fork inherits the file of its parent

_PAUSE_S = 0.005
_MOST_THREADS = 16
_THREAD_S = 0.1  # for one of these threads, most of which have no Python frames to tell


def take(pid: int, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    """Returns the frames of a worker's main thread, or of the thread that it waits for; empty if it cannot tell."""
    return take_all([pid], timeout_s).get(pid, ())


def take_all(pids: Sequence[int], timeout_s: float = 1.0) -> dict[int, tuple[Frame, ...]]:
    """Returns the frames of several workers, as `take` does, by process; those that cannot tell are missing.

    All are asked before the first answer is waited for, so that one that does not answer keeps nobody waiting.
    """
    files: dict[int, int] = {}
    asked = []
    try:
        for pid in pids:
            if (file := _open(pid)) is not None:
                files[pid] = file
                if _is_asked(pid, file):  # at once, since a process that ends soon has no handler any more
                    asked.append(pid)
        deadline_s = time.monotonic() + timeout_s
        found = {pid: frames for pid in asked if (frames := _answer(files[pid], deadline_s))}
        deadline_s = time.monotonic() + timeout_s
        for pid, frames in found.items():
            if stacks.is_in_a_thread(frames):
                found[pid] = _elsewhere(pid, files[pid], deadline_s) or frames
        return found
    finally:
        for file in files.values():
            os.close(file)


def _is_asked(pid: int, file: int) -> bool:
    """Asks a worker's main thread for its stack; returns whether the worker is still there."""
    try:
        pidfd = pidfd_open(pid)
    except OSError:  # it has just ended
        return False
    try:
        os.ftruncate(file, 0)
        pidfd_send_signal(pidfd, SIGNAL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _elsewhere(pid: int, file: int, deadline_s: float) -> tuple[Frame, ...]:
    """Returns the frames of the first other thread with Python frames that does not itself wait for one."""
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except AttributeError:  # an older C library
        return ()
    for thread in threads(pid)[:_MOST_THREADS]:
        if (now_s := time.monotonic()) >= deadline_s:
            break
        os.ftruncate(file, 0)
        tgkill(pid, thread, SIGNAL)
        frames = _answer(file, min(deadline_s, now_s + _THREAD_S))
        if frames and not stacks.is_in_a_thread(frames):
            return frames
    return ()


def _answer(file: int, deadline_s: float) -> tuple[Frame, ...]:
    """Returns the frames once the stack is complete, or what there is of it in time."""
    while True:
        text = os.pread(file, 1 << 20, 0).decode(errors="replace")
        if stacks.is_whole(text) or time.monotonic() >= deadline_s:
            return stacks.parse(text)
        time.sleep(_PAUSE_S)


def _open(pid: int) -> int | None:
    """Returns a descriptor of the file into which a process writes its stack; None if it would not answer."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")), 0)
        if not caught >> (SIGNAL - 1) & 1:
            return None
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(f"/memfd:{FILE}-{pid} "):
                return os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it has just ended
        pass
    return None
