"""Linux system calls that some builds of Python lack, and helpers for process exits, file descriptors and memory.

Python's own function is used if it exists. The builds from conda and uv lack some functions, because they target older
systems. Except for `_STDIN_CALLS`, the system call numbers used here are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.errors import OutOfDescriptorsError

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
F_OFD_SETLK, F_OFD_SETLKW = 37, 38

_STDIN_CALLS = {"x86_64": (0, 23, 270), "aarch64": (63, 72)}  # the system call numbers of read, select and pselect6
_PR_SET_PDEATHSIG = 1
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _PIDFD_GETFD = 424, 434, 438

# The library is opened at import, because opening it takes locks. If another thread held one during a fork, the child
# would wait forever.
_libc = ctypes.CDLL(None, use_errno=True)


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Returns True if `error`, or an error in its chain of causes, reports a shortage of file descriptors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_descriptors_error(who: str, what: str) -> OutOfDescriptorsError:
    """Returns the error for the rank or process `who`, which has no file descriptors left for the purpose `what`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OutOfDescriptorsError(
        f"{who}: out of file descriptors ({limit} of {limit}), needed for {what}. Raise the limit (ulimit -n, or "
        "LimitNOFILE= of a systemd unit), or check which files the program leaves open (ls -l /proc/PID/fd)",
    )


CUDA_DEVICE = "/dev/nvidia-uvm"
"""The file that CUDA's driver opens when it is initialized. Counting GPUs with NVML does not open it."""


def has_opened(path: str) -> bool:
    """Returns True if this process has the file open."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor has been closed in the meantime
            if os.readlink(f"/proc/self/fd/{name}") == path:
                return True
    return False


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process `parent`, exits."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die_on_interrupt() -> None:
    """Makes Ctrl-C kill this process instead of raising KeyboardInterrupt, unless SIGINT is ignored or has a handler.

    CPython discards an exception that is raised in the callbacks of its import locks, so a process that is importing
    modules would miss the signal.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt in the `with` block, even after `die_on_interrupt`."""
    is_fatal = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if is_fatal:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_fatal:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Returns the descriptor of a new, empty file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(_libc.memfd_create(name.encode(), flags), "memfd_create")


def has_children() -> bool:
    """Returns True if this process has child processes, including exited ones that it has not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def pidfd_open(pid: int) -> int:
    """Returns a descriptor for a process. The descriptor becomes readable when the process exits.

    Raises an OSError before Linux 5.3, and in a sandbox that forbids process descriptors.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, "pidfd_open", pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Sends a signal to the process that a descriptor refers to, or raises an OSError if the process has exited."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, "pidfd_send_signal", pidfd, number, 0, 0)


def pidfd_getfd(pidfd: int, descriptor: int) -> int:
    """Duplicates the descriptor with the given number in another process into this process; returns the duplicate.

    Raises an OSError if the kernel does not permit this process to access the other one.
    """
    return _call(_PIDFD_GETFD, "pidfd_getfd", pidfd, descriptor, 0)


def _call(number: int, name: str, *arguments: int) -> int:
    words = [ctypes.c_long(argument) for argument in arguments]
    fd = _checked(int(_libc.syscall(ctypes.c_long(number), *words)), name)
    if number != _PIDFD_SEND_SIGNAL:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    return fd


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def process_fields(pid: int | str, root: str = "/proc") -> list[str]:
    """Returns the fields of /proc/PID/stat that follow the program's name; the first is the state (see proc(5)).

    Raises an OSError if there is no such process.
    """
    with open(f"{root}/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def waits_for_stdin(pid: int, root: str = "/proc") -> bool:
    """Returns True if the main thread of a process is known to be waiting for input on descriptor 0."""
    try:
        with open(f"{root}/{pid}/syscall") as file:
            words = file.read().split()
    except OSError:
        return False
    read, *selects = _STDIN_CALLS.get(os.uname().machine, (-1,))
    if len(words) < 2 or not words[0].isdecimal():  # the process is running, or is not in a system call
        return False
    # A line editor calls select or pselect6 with a first argument of 1, so it waits for descriptor 0 only.
    return (int(words[0]), int(words[1], 16)) in [(read, 0), *((select, 1) for select in selects)]


def read_only_memory(root: str = "/proc") -> list[tuple[int, int]]:
    """Returns the address ranges that this process has mapped but cannot write to, in ascending order."""
    with open(f"{root}/self/maps", "rb") as lines:
        fields = [line.split(None, 2)[:2] for line in lines]
    found = [addresses.split(b"-") for addresses, permissions in fields if permissions[1:2] != b"w"]
    return [(int(start, 16), int(stop, 16)) for start, stop in found]
