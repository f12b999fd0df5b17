"""What a diagnosis says: the cause, whom it blames, and the sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """Why a job does not go on, or has failed."""

    EXCEPTION = "an exception"
    KILLED = "a rank was killed"
    OUT_OF_MEMORY = "out of memory"
    EXITED = "a rank ended with an exit code"
    LEFT = "a rank's script ended before the others'"
    STOPPED = "a rank is stopped"
    SWAPPING = "a rank waits for swapped memory"
    LOADER = "a rank waits for its data"
    USER_CODE = "a rank is stuck in its program"
    BUSY = "a rank is at work elsewhere"
    DEADLOCK = "calls of several groups wait for each other"
    SKIPPED = "a rank skipped a call, or made it later"
    ORDER = "a rank made calls in another order"
    TWICE = "a rank made a call twice"
    SKIPPED_OR_TWICE = "a rank skipped a call or made one twice"
    OTHER_SHAPE = "a rank called with another shape or type"
    OTHER_CALL = "a rank made another call"
    UNKNOWN = "a rank is not there, and nothing is known of it"
    NO_PROGRESS = "all ranks are in a call that does not end"
    SLOW_CORE = "a rank computes more slowly than the others"
    SLOW_LINK = "a link is slower than the others"


FAILURES = (Cause.EXCEPTION, Cause.KILLED, Cause.OUT_OF_MEMORY, Cause.EXITED)  # of one rank, by itself


@dataclass(frozen=True)
class Verdict:
    """A diagnosis.

    Attributes:
        cause: why.
        blamed: the ranks that are at fault, or one of which is.
        sentence: what the user reads.
        is_fault: whether something is wrong; otherwise others wait for a rank that works on something.
        is_certain: whether no rank of which nothing is known can have led to it.
    """

    cause: Cause
    blamed: tuple[int, ...]
    sentence: str
    is_fault: bool = True
    is_certain: bool = True

    @property
    def is_failure(self) -> bool:
        """Whether a rank failed by itself; what other ranks do cannot change that."""
        return self.cause in FAILURES
