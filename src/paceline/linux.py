"""Calls of Linux that some builds of Python lack: conda's and uv's are built for older systems than they run on.

Where Python has the function, it is used. The numbers are the kernel's, the same on every architecture.

What to say when the system gives this process no more file descriptors.

Ties the life of a process to that of its parent.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal

from paceline.errors import OutOfDescriptorsError

_SHORTAGES = (errno.EMFILE, errno.ENFILE)


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Whether `error`, or what it arose from, is that there are no descriptors left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_descriptors_error(who: str, what: str) -> OutOfDescriptorsError:
    """The error for `who`, a rank or process, that needed descriptors for `what`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OutOfDescriptorsError(
        f"{who}: out of file descriptors ({limit} of {limit}), needed for {what}. Raise the limit (ulimit -n, or "
        "LimitNOFILE= of a systemd unit), or look for what the program leaves open (ls -l /proc/PID/fd)",
    )


_PR_SET_PDEATHSIG = 1
# Opened beforehand: the child of a process with threads must not wait for locks that another thread held.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, its parent, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
F_OFD_SETLK, F_OFD_SETLKW = 37, 38

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _PIDFD_GETFD = 424, 434, 438


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Returns the descriptor of a new, empty file in memory.

    Raises:
        OSError: there are no descriptors, or no memory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    import ctypes

    return _checked(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), flags), "memfd_create")


def pidfd_open(pid: int) -> int:
    """Returns a descriptor of a process, which can be read when that has ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel has no such descriptors (before 5.3), or a sandbox forbids them.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, "pidfd_open", pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Sends a signal to the process of a descriptor.

    Raises:
        OSError: it has ended, or is another user's.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, "pidfd_send_signal", pidfd, number, 0, 0)


def pidfd_getfd(pidfd: int, descriptor: int) -> int:
    """Returns a descriptor here of what a process has open as `descriptor`.

    Raises:
        OSError: the kernel does not let this process reach into that one.
    """
    return _call(_PIDFD_GETFD, "pidfd_getfd", pidfd, descriptor, 0)


def _call(number: int, name: str, *arguments: int) -> int:
    import ctypes

    words = [ctypes.c_long(each) for each in arguments]
    fd = _checked(int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words)), name)
    if number != _PIDFD_SEND_SIGNAL:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    return fd


def _checked(result: int, name: str) -> int:
    if result < 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
