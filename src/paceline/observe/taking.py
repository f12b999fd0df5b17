"""Takes a worker's Python stack without its help, also while it is stuck in native code.

At its start, a worker of `paceline run` has faulthandler answer a real-time signal with the stack of the thread that
receives it, written into a memory file. The launcher finds that file through /proc. The signal would kill a process
that has no handler for it; so it is sent only to one that does, and never to a worker's children. Only the thread that
receives the signal is written down: to walk the frames of a thread that runs could crash the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

from paceline.observe import stacks
from paceline.observe.evidence import Frame
from paceline.observe.processes import threads

SIGNAL = signal.SIGRTMAX - 7  # programs rarely use it; `launch/bootstrap.py` names it too
FILE = "paceline-stack"  # and the process's number, since a fork inherits the file of its parent

_PAUSE_S = 0.005
_MOST_THREADS = 16


def take(pid: int, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    """Returns the frames of a worker's main thread, or of the thread that it waits for; empty if it cannot tell."""
    opened = _open(pid)
    if opened is None:
        return ()
    try:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                frames = _ask(opened, lambda: signal.pidfd_send_signal(pidfd, SIGNAL), timeout_s)
            finally:
                os.close(pidfd)
            return _elsewhere(pid, opened, timeout_s) or frames if stacks.is_in_a_thread(frames) else frames
    finally:
        os.close(opened)
    return ()


def _elsewhere(pid: int, file: int, timeout_s: float) -> tuple[Frame, ...]:
    """Returns the frames of the first other thread with Python frames that does not itself wait for one."""
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except AttributeError:  # an older C library
        return ()
    for thread in threads(pid)[:_MOST_THREADS]:

        def send(thread: int = thread) -> None:
            tgkill(pid, thread, SIGNAL)

        frames = _ask(file, send, min(0.1, timeout_s))
        if frames and not stacks.is_in_a_thread(frames):
            return frames
    return ()


def _ask(file: int, send: Callable[[], None], timeout_s: float) -> tuple[Frame, ...]:
    """Sends the signal and returns the frames once the stack is complete, or what there is of it in time."""
    os.ftruncate(file, 0)
    send()
    deadline_s = time.monotonic() + timeout_s
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
