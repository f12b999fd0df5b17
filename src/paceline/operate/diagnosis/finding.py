"""Result of a diagnosis: the cause, the blamed ranks and the message for the user. Also formats message parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.operate.diagnosis.job_snapshot import ExitReason, JobSnapshot, RankState
from paceline.operate.diagnosis.wait_graph import CallWait

_MOST_NAMED = 8
_MOST_LINES = 64
DEFAULT_GROUPS = ("group default", "group 0")  # Paceline's and torch.distributed's


class Cause(Enum):
    """Cause of a hang, a slowdown or a failure of a job."""

    EXCEPTION = "an exception"
    KILLED = "a rank was killed"
    OUT_OF_MEMORY = "out of memory"
    EXITED = "a rank exited with an error code"
    LEFT = "a rank's script ended before the others'"
    STOPPED = "a rank is stopped"
    SWAPPING = "a rank waits for swapped memory"
    LOADER = "a rank waits for its data"
    USER_CODE = "a rank is stuck in its program"
    BUSY = "a rank is busy elsewhere"
    INPUT = "a rank waits for input"
    STORE = "a rank waits for a key that no rank has set in a store"
    IDLE = "no rank is making calls or working"
    DEADLOCK = "calls of several groups wait for each other"
    SKIPPED = "a rank skipped a call or made it later"
    ORDER = "a rank made calls in a different order"
    TWICE = "a rank made a call twice"
    SKIPPED_OR_TWICE = "a rank skipped a call or made one twice"
    OTHER_SHAPE = "a rank made a call with different arguments"
    OTHER_CALL = "a rank made a different call"
    UNKNOWN = "a rank has not reached a call and left no recording"
    NO_PROGRESS = "all ranks are in a call that does not complete"
    DEVICE_BUSY = "a rank's device has not finished the work before a call"
    SLOW_CORE = "a rank computes more slowly than the others"
    SLOW_DEVICE = "a rank's device computes more slowly than the others'"
    LONG_STEPS = "a rank takes longer than the others in some steps"
    SLOW_LINK = "a link is slower than the others"


FAILURES = (Cause.EXCEPTION, Cause.KILLED, Cause.OUT_OF_MEMORY, Cause.EXITED)  # causes in which a rank fails on its own


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        cause: the cause of the problem.
        blamed: the ranks at fault, or all candidates if the rank at fault cannot be determined.
        sentence: the message for the user, in one sentence.
        is_fault: whether something is wrong. If False, the ranks are only waiting for a rank that is doing other work.
        is_certain: whether ranks with an unknown state can be ruled out as the cause.
    """

    cause: Cause
    blamed: tuple[int, ...]
    sentence: str
    is_fault: bool = True
    is_certain: bool = True

    @property
    def is_early_exit(self) -> bool:
        """Whether a rank exited before the others, without an error."""
        return self.cause is Cause.LEFT

    @property
    def is_failure(self) -> bool:
        """Whether a rank failed on its own. If so, the states of the other ranks do not matter."""
        return self.cause in FAILURES


def named(ranks: Sequence[int], word: str = "rank") -> str:
    """Formats a list of ranks: `rank 3`, `ranks 0-2`, `ranks 0, 2-4`.

    >>> named([3, 0, 1, 2, 6])
    'ranks 0-3, 6'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return f"{word}{'s' if len(set(ranks)) > 1 else ''} {', '.join(texts[:_MOST_NAMED])}{more}"


def reminder(verdict: Diagnosis, word: str = "rank") -> str:
    """Returns a short reference to a diagnosis that has already been printed."""
    who = f" ({named(verdict.blamed, word)})" if verdict.blamed else ""
    return f"the cause was explained above: {verdict.cause.value}{who}"


def lasting(seconds: float) -> str:
    """Formats a duration: `0.3 s`, `14 s`, `3 min`, `2.5 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(value: float) -> str:
    """Formats a duration given in milliseconds, with three significant digits.

    >>> milliseconds(174.2), milliseconds(17.42), milliseconds(1.742), milliseconds(2500.0)
    ('174 ms', '17.4 ms', '1.74 ms', '2.5 s')
    """
    if value >= 999.5:
        return f"{value / 1000:.3g} s"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} ms"


def verb(count: int, plural: str) -> str:
    """Returns the singular or plural form of a verb: `waits` or `wait`, `is` or `are`."""
    if plural in ("are", "have"):
        return {"are": "is", "have": "has"}[plural] if count == 1 else plural
    return f"{plural}s" if count == 1 else plural


def beginning(snapshot: JobSnapshot, ranks: Sequence[int]) -> str:
    """Returns a prefix for a sentence, with the lowest step of these ranks; "" if no step is known."""
    steps = [rank.step for rank in snapshot.ranks if rank.rank in ranks and rank.step is not None]
    return f"step {min(steps)}: " if steps else ""


def waiting(snapshot: JobSnapshot, wait: CallWait, of: str = "", without: int | None = None) -> str:
    """Formats the waiting ranks, their call and their line: `ranks 0-2 wait in all_reduce(float32, 4096) call 7`.

    Args:
        snapshot: the state of the job.
        wait: the call in which the ranks are waiting.
        of: a description of the group, appended to the call.
        without: a rank to omit, or None.
    """
    who = [rank for rank in wait.waiters if rank != without]
    waiters = [rank for rank in snapshot.ranks if rank.rank in who]
    have_ended = all(rank.ending is not None for rank in waiters)
    word = "waited" if have_ended else verb(len(who), "wait")
    call = str(wait.call)
    if wait.is_formation:
        name = next((membership.name for rank in waiters if (membership := rank.memberships.get(wait.call.group))), "")
        of = f" of the {name}" if name else ""
        if name in DEFAULT_GROUPS:
            call, of = "init_process_group()", ""
    line = wait.call.line or next((line for rank in waiters if (line := line_of(rank))), "")
    where = f" ({line})" if line else ""
    return f"{named(who, snapshot.word)} {word} in {call}{of}{where}"


def line_of(rank: RankState) -> str:
    """Returns the line of the user's program that a rank is executing or at which it failed; "" if unknown."""
    if rank.place is not None and rank.place.line:
        return rank.place.line
    has_failed = rank.ending is not None and rank.ending.manner is not ExitReason.FINISHED
    return rank.ending.line if rank.ending is not None and has_failed else ""


def line_of_call(rank: RankState, group: str, sequence: int) -> str:
    """Returns the line in the user's program that made a call; "" if unknown.

    If the line was not recorded, the line that the rank is executing is returned, because the rank must still be in the
    call.
    """
    made = (call for call in rank.calls if (call.group, call.sequence) == (group, sequence) and not call.is_message)
    line = next((call.line for call in made if call.line), "")
    return line or line_of(rank)


def absence(snapshot: JobSnapshot, rank: RankState, doing: str) -> str:
    """Describes an absent rank, with its activity and the duration of that activity."""
    since = "" if rank.since_s is None or rank.ending is not None else f", for {lasting(snapshot.now_s - rank.since_s)}"
    at_work = "" if rank.phase is None or rank.ending is not None else f"; its device is {during(rank)}"
    return f"{named([rank.rank], snapshot.word)} has not reached this call: it {doing}{since}{at_work}"


def during(rank: RankState) -> str:
    """Formats the phase that a rank's device is executing: `in the backward of step 7`."""
    assert rank.phase is not None
    return f"in the {rank.phase.name}" + (f" of step {rank.phase.step}" if rank.phase.step is not None else "")


def summary(ranks: Sequence[RankState], world_size: int) -> list[str]:
    """Formats the progress of each rank in one line. A further line lists the ranks without a recording."""
    lines = [_line(rank) for rank in ranks[:_MOST_LINES]]
    if len(ranks) > _MOST_LINES:
        lines.append(f"... and {len(ranks) - _MOST_LINES} more ranks")
    missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if missing:
        lines.append(f"{named(missing)}: no recording")
    return lines


def _line(rank: RankState) -> str:
    step = f"step {rank.step}, " if rank.step is not None else ""
    last = rank.latest_call
    if last is None:
        return f"rank {rank.rank} ({rank.host}, pid {rank.pid}): {step}no call"
    state = "in" if last.ended_s is None else "failed in" if last.is_open else "last ended"
    return f"rank {rank.rank} ({rank.host}, pid {rank.pid}): {step}{state} {last}"
