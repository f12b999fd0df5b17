"""Paceline's error classes, and functions that format values and source files for error messages.

A message has four parts: what was seen, where (rank, host, pid, call), what was expected, and what to do. Invalid
arguments raise plain `ValueError` and `TypeError`; the errors below concern another process or a file.

Programs written for torch.distributed catch that library's errors. In a process that has imported torch, these classes
are therefore subclasses of torch's errors: `CollectiveError` derives from `torch.distributed.DistBackendError`,
`StoreError` from `DistStoreError`, and so on.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Sequence
from enum import Enum

_MOST_SHOWN = 100  # characters
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_ENDINGS = {1: "st", 2: "nd", 3: "rd"}
STARTERS = ("paceline/operate/launch/workers/bootstrap.py", "paceline/operate/launch/workers/template.py", "runpy.py")
"""Path suffixes of files that run a script."""


def and_more(names: Sequence[object], most: int) -> str:
    """Returns the first `most` names as text, followed by the number of omitted names.

    >>> and_more([0, 1, 2], most=2)
    '0, 1 and 1 more'
    >>> and_more([0, 1, 2], most=3)
    '0, 1, 2'
    """
    named = ", ".join(map(str, names[:most]))
    return f"{named} and {len(names) - most} more" if len(names) > most else named


def short_repr(value: object) -> str:
    """Returns text for an error message: the `repr` of a simple value, or the type of any other value.

    The `repr` of a tensor is avoided because it reads all values, and crashes the process if the memory has been freed.

    >>> short_repr("soon"), short_repr(None), short_repr([1])
    ("'soon'", 'None', 'a list')
    """
    is_short = value is None or isinstance(value, (str, bytes, int, float, Enum))
    return repr(value)[:_MOST_SHOWN] if is_short else f"a {type(value).__name__}"


def printable(text: str) -> str:
    """Escapes all characters except printable ones and line breaks, so that names in a file cannot control a terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def ordinal(number: int) -> str:
    """Formats an ordinal number.

    >>> [ordinal(number) for number in (1, 2, 3, 10, 11, 23)]
    ['1st', '2nd', '3rd', '10th', '11th', '23rd']
    """
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{_ENDINGS.get(number % 10, 'th')}"


def is_user_file(file: str) -> bool:
    """Returns True if a source file belongs to the user, rather than to Python, an installed package or Paceline.

    Messages refer only to lines in the user's files.
    """
    is_own = file.startswith(("<", _PACKAGE)) or file.endswith(STARTERS)
    folders = file.split("/")[:-1]
    is_installed = (
        "site-packages" in folders or "dist-packages" in folders or any(map(_is_library, folders, folders[1:]))
    )
    return not (is_own or is_installed)


def _is_library(folder: str, name: str) -> bool:
    """Returns True if a folder with this name in `folder` is Python's library directory, such as `lib/python3.11`."""
    version = name.removeprefix("python").removesuffix(".zip").replace(".", "")
    return folder in ("lib", "lib64") and name.startswith("python3") and version.isdecimal()


def user_file_name(file: str) -> str | None:
    """Returns a file's name for use in messages, such as `train.py`, or None if the file does not belong to the user.

    If this process has imported torch, its files are recognized in any directory (`pip install --target`).
    """
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    is_torchs = bool(torch) and file.startswith(torch + os.sep)
    if is_torchs or not is_user_file(file):
        return None
    return os.path.basename(file).encode("utf-8", "backslashreplace").decode()  # the core stores names as UTF-8


class _Base(RuntimeError):
    """Base of `PacelineError`. (The bases of a direct subclass of a built-in class cannot be changed later.)"""


class PacelineError(_Base):
    """Base class of all errors below."""

    def __init__(self, *args: object) -> None:
        # The bases are changed when the first error is created rather than at import, because the launcher imports this
        # module without torch, and a program may import torch later.
        if not _inherits_from_torch and "torch" in sys.modules:
            _inherit_from_torch()
        super().__init__(*args)


class _TimedOut(PacelineError):
    """Base of timeout errors. The message contains the words by which programs recognize torch's timeouts."""

    def __init__(self, message: str) -> None:
        super().__init__(message if "timed out" in message else f"timed out: {message}")


class OutOfDescriptorsError(PacelineError, OSError):
    """This process has reached its limit on open files and sockets; the message reports the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.EMFILE


class AuthenticationError(PacelineError):
    """The other end of a connection does not have this job's secret, or rejected this process's proof."""


class RendezvousError(PacelineError):
    """The rendezvous failed: a rank is missing, was claimed twice, or was started with a different world size."""


class RendezvousTimeoutError(_TimedOut, RendezvousError, TimeoutError):
    """Some ranks did not arrive before the timeout; the message lists the ranks that arrived and the missing ones."""


class StoreError(PacelineError):
    """A store rejected a request."""


class StoreTimeoutError(_TimedOut, StoreError, TimeoutError):
    """A key did not appear, or the server did not answer, before the timeout."""


class StoreQueueEmptyError(StoreTimeoutError):
    """`queue_pop` with `block=False` found nothing in the queue."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store's server could not be reached, or closed the connection."""


class CollectiveError(PacelineError):
    """A collective call did not complete."""


class CollectiveMismatchError(CollectiveError):
    """The ranks in a group made calls that do not match; every rank in the group raises this error."""


class CollectiveTimeoutError(_TimedOut, CollectiveError, TimeoutError):
    """A rank did not make a call before the timeout; the message identifies the rank and its latest call.

    If that rank is waiting in another call, the message also identifies the rank that blocks that call.

    Attributes: `missing`, the other ranks (in the default group) that did not make the call. It is empty if only this
    rank was late, or if the engine cannot determine the missing ranks.
    """

    missing: tuple[int, ...] = ()


class CollectiveObjectError(CollectiveError):
    """A rank could not send its object, or sent data that this rank cannot decode or does not allow (a pickle).

    The group remains usable. Attributes: `rank`, the sender's rank in the default group.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(CollectiveError):
    """A rank died or left, and the group's calls cannot continue.

    If a rank left because it had lost another rank, the error describes the rank that was lost first, and the message
    identifies both ranks. The first rank may be outside this group.

    Attributes: `rank` (in the default group), `host` and `pid` of the lost process.
    """

    def __init__(self, message: str, *, rank: int, host: str, pid: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid


class GroupAbortedError(CollectiveError):
    """A rank called `abort` on the group, so the group's calls were aborted on all ranks.

    Attributes: `rank`, the rank (in the default group) of the process that called `abort`.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ReplicasDifferError(PacelineError):
    """Parameters, buffers, optimizer states or random states differ between ranks.

    Attributes: `ranks`, the ranks (in the default group) that differ from the majority, or all ranks if there is no
    majority.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the message states the file and the rank and suggests a fix."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint is damaged: a file is missing, is truncated, or does not contain the bytes that were written."""


class WorkerError(PacelineError):
    """A worker started by `paceline.spawn` failed; the message ends with its traceback.

    Attributes: `rank`, the rank of the worker that failed first, and `exit_code`, its exit code (a negative value is
    the number of the signal that killed it).
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


# The names of the classes in torch._C in all releases since 2.6. Classes that a build of torch lacks are skipped.
_OF_TORCH = {
    PacelineError: "_DistError",
    AuthenticationError: "_DistNetworkError",
    RendezvousError: "_DistStoreError",  # in torch, the store raises this if ranks are missing
    StoreError: "_DistStoreError",
    StoreQueueEmptyError: "_DistQueueEmptyError",
    StoreConnectionError: "_DistNetworkError",
    CollectiveError: "_DistBackendError",
}
_inherits_from_torch = False
_inheriting = threading.Lock()


def _inherit_from_torch() -> None:
    global _inherits_from_torch
    with _inheriting:
        core = getattr(sys.modules["torch"], "_C", None)
        if core is None or _inherits_from_torch:  # torch is still being imported, or another thread was faster
            return
        for ours, name in _OF_TORCH.items():
            theirs = getattr(core, name, None)
            if theirs is not None and not issubclass(ours, theirs):
                first, *others = ours.__bases__
                ours.__bases__ = (first, theirs, *others)
        _inherits_from_torch = True
