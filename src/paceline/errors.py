"""Every error Paceline raises by a name of its own.

A message has four parts: what was seen, where (rank, host, pid, call), what was expected, what to do.
Broken argument rules are plain `ValueError` and `TypeError`; everything that involves another process is below.
"""

from __future__ import annotations


class PacelineError(RuntimeError):
    """The base of all errors below."""


class AuthenticationError(PacelineError):
    """The other end of a connection does not hold this job's secret, or refused ours."""


class RendezvousError(PacelineError):
    """The ranks did not find each other: a rank is missing, claimed twice, or was given another world size."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not all ranks arrived before the time-out; the message names those that did and those that did not."""


class StoreError(PacelineError):
    """A store refused a request."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not appear, or the server did not answer, before the time-out."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store's server could not be reached, or closed the connection."""


class CollectiveError(PacelineError):
    """A collective call did not complete."""


class CollectiveMismatchError(CollectiveError):
    """The ranks of a group made calls that do not fit together; every rank of the group gets this error."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank did not come to a call before the time-out; the message names it and its latest call.

    Attributes: `missing`, the ranks (in the default group) that did not come.
    """

    missing: tuple[int, ...] = ()


class CollectiveObjectError(CollectiveError):
    """A rank sent what this one cannot, or was told not to, make an object of; or it could not send its object.

    The group stays usable. Attributes: `rank` (in the default group) of the sender.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(CollectiveError):
    """A rank of the group died.

    Attributes: `rank` (in the default group), `host` and `pid` of the process that was lost.
    """

    def __init__(self, message: str, *, rank: int, host: str, pid: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid


class WorkerError(PacelineError):
    """A worker started by `paceline.spawn` failed; the message ends with its traceback.

    Attributes: `rank` of the worker that failed first and its `exit_code` (negative: the signal that ended it).
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
