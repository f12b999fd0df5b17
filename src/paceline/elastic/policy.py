"""The settings of an elastic job's coordinator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The numbers by which the coordinator decides; the defaults suit everything but tests.

    Attributes:
        min_workers: with fewer, the members finish their batch and wait.
        max_machines: further machines wait for a place.
        start_patience_s: how long the first view waits for all workers, once the first is ready and `min_workers` are.
        gather_s: how long a worker that is ready waits for others that may come at the same time.
        break_patience_s: how long a report of broken connections waits for the report of the death that explains it.
        most_breaks: the job ends after so many breaks in a row without a death and without a round committed...
        breaks_within_s: ... within so many seconds.
        hope_s: how long the last workers of a view are given to say whether they hold the state, when all that are
            known to hold it are dead.
        quorum_timeout_s: how long a coordinator that is cut off from too many members waits for them.
        join_timeout_s: how long the job waits for `min_workers`.
        return_patience_s: how long after it was heard of last the workers of a machine that cannot be reached are left
            out, unless workers report before that their connections broke.
        quiet_s: how long after the job began the first view waits for the news that another job runs already.
        follow_patience_s: how long a new coordinator gives machines to follow it, before it leaves their workers out.
    """

    min_workers: int = 1
    max_machines: int = 1 << 30
    start_patience_s: float = 10.0
    gather_s: float = 0.2
    break_patience_s: float = 0.3
    most_breaks: int = 5
    breaks_within_s: float = 30.0
    hope_s: float = 10.0
    quorum_timeout_s: float = 120.0
    join_timeout_s: float = 600.0
    return_patience_s: float = 0.0
    quiet_s: float = 0.0
    follow_patience_s: float = 0.5
