"""Error classes of Paceline, and two functions that format values for messages.

A message has four parts: what was seen, where (rank, host, pid, call), what was expected, and what to do.
Wrong arguments raise plain `ValueError` and `TypeError`; the errors below involve another process or a file.

Programs that were written for torch.distributed catch its errors. In a process that has imported torch, these classes
are therefore subclasses of torch's: `CollectiveError` of `torch.distributed.DistBackendError`, `StoreError` of
`DistStoreError`, and so on.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Sequence
from enum import Enum

_MOST_SHOWN = 100  # characters


def and_more(names: Sequence[object], most: int) -> str:
    """Returns the first `most` of `names` as text, with the number of the others.

    >>> and_more([0, 1, 2], most=2)
    '0, 1 and 1 more'
    >>> and_more([0, 1, 2], most=3)
    '0, 1, 2'
    """
    named = ", ".join(map(str, names[:most]))
    return f"{named} and {len(names) - most} more" if len(names) > most else named


def short_repr(value: object) -> str:
    """Returns the `repr` of a simple value, and the type of any other, for a message.

    The `repr` of a tensor reads all of its values, and ends the process if its memory has been freed.

    >>> short_repr("soon"), short_repr(None), short_repr([1])
    ("'soon'", 'None', 'a list')
    """
    is_short = value is None or isinstance(value, (str, bytes, int, float, Enum))
    return repr(value)[:_MOST_SHOWN] if is_short else f"a {type(value).__name__}"


class _Base(RuntimeError):
    """A base for `PacelineError`, since Python cannot change the bases of a direct subclass of a built-in class."""


class PacelineError(_Base):
    """The base of all errors below."""

    def __init__(self, *args: object) -> None:
        # Done with the first error and not at import: the launcher imports this module without torch, and a program
        # may import torch later.
        if not _inherits_from_torch and "torch" in sys.modules:
            _inherit_from_torch()
        super().__init__(*args)


class _TimedOut(PacelineError):
    """An error whose message contains the words that programs look for in torch's time-outs."""

    def __init__(self, message: str) -> None:
        super().__init__(message if "timed out" in message else f"timed out: {message}")


class OutOfDescriptorsError(PacelineError, OSError):
    """This process has as many open files and sockets as the system allows; the message gives the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.EMFILE


class AuthenticationError(PacelineError):
    """The other end of a connection does not hold this job's secret, or refused ours."""


class RendezvousError(PacelineError):
    """The ranks did not find each other: a rank is missing, claimed twice, or was given another world size."""


class RendezvousTimeoutError(_TimedOut, RendezvousError, TimeoutError):
    """Not all ranks arrived before the time-out; the message names those that did and those that did not."""


class StoreError(PacelineError):
    """A store refused a request."""


class StoreTimeoutError(_TimedOut, StoreError, TimeoutError):
    """A key did not appear, or the server did not answer, before the time-out."""


class StoreQueueEmptyError(StoreTimeoutError):
    """`queue_pop` with `block=False` found nothing in the queue."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store's server could not be reached, or closed the connection."""


class CollectiveError(PacelineError):
    """A collective call did not complete."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group made calls that do not match; every rank of the group raises this error."""


class CollectiveTimeoutError(_TimedOut, CollectiveError, TimeoutError):
    """A rank did not reach a call before the time-out; the message names it and its latest call.

    If that rank merely waits in another call, the message also names the rank that holds it up there.

    Attributes: `missing`, the other ranks (in the default group) that did not reach the call. It is empty if only this
    rank was late, and where the engine cannot determine them.
    """

    missing: tuple[int, ...] = ()


class CollectiveObjectError(CollectiveError):
    """A rank could not send its object, or sent data that this rank cannot decode or is configured not to decode.

    The group stays usable. Attributes: `rank` (in the default group) of the sender.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(CollectiveError):
    """A rank died or left, and the group's calls cannot continue.

    If a rank left because it had lost another one, the error describes the first rank that was lost, which need not be
    in this group, and the message names both.

    Attributes: `rank` (in the default group), `host` and `pid` of the process that was lost.
    """

    def __init__(self, message: str, *, rank: int, host: str, pid: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid


class GroupAbortedError(CollectiveError):
    """A rank called `abort` of the group, which ended the calls of all its ranks.

    Attributes: `rank` (in the default group) of the process that aborted the group.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ReplicasDifferError(PacelineError):
    """Ranks do not hold the same parameters, buffers, optimizer's state or random state.

    Attributes: `ranks` (in the default group) that differ from the majority, or all if there is none.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the message names the file, the rank and what to do."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint is damaged: a file is missing, truncated, or does not contain the bytes that were written."""


class WorkerError(PacelineError):
    """A worker started by `paceline.spawn` failed; the message ends with its traceback.

    Attributes: `rank` of the worker that failed first and its `exit_code` (if negative, the signal that ended it).
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


# The names in torch._C, where every release since 2.6 has them. A class that a build of torch lacks is left out.
_OF_TORCH = {
    PacelineError: "_DistError",
    AuthenticationError: "_DistNetworkError",
    RendezvousError: "_DistStoreError",  # torch's rendezvous uses the store, which raises if ranks are missing
    StoreError: "_DistStoreError",
    StoreQueueEmptyError: "_DistQueueEmptyError",
    StoreConnectionError: "_DistNetworkError",
    CollectiveError: "_DistBackendError",
}
_inherits_from_torch = False
_inheriting = threading.Lock()


def _inherit_from_torch() -> None:
    """Makes torch's errors bases of Paceline's."""
    global _inherits_from_torch
    with _inheriting:
        core = getattr(sys.modules["torch"], "_C", None)
        if core is None or _inherits_from_torch:  # torch is still being imported, or another thread did this
            return
        for ours, name in _OF_TORCH.items():
            theirs = getattr(core, name, None)
            if theirs is not None and not issubclass(ours, theirs):
                first, *others = ours.__bases__
                ours.__bases__ = (first, theirs, *others)
        _inherits_from_torch = True
