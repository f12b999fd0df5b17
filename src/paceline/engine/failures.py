"""Turns the outcome of a failed call into the error that the user reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.descriptors import out_of_descriptors
from paceline.engine.channel import HeaderFields, Outcome
from paceline.engine.codes import dtype_name
from paceline.engine.naming import by_what, describe_call, names
from paceline.engine.processes import Process
from paceline.engine.time_outs import timed_out
from paceline.errors import (
    CollectiveError,
    CollectiveMismatchError,
    GroupAbortedError,
    PeerLostError,
)
from paceline.schedule.registry import QUANTISED, name_of


class Code(IntEnum):
    """How a call ended; the numbers are those of native/call/call.hpp."""

    OK = 0
    MISMATCH = 1
    TIMED_OUT = 2
    PEER_LOST = 3
    INTERRUPTED = 4
    SCHEDULE_UNFIT = 5
    REFUSED = 6  # the library on which the engine rests refused the call
    STARVED = 7
    TOO_MANY_OFFERS = 8
    ABORTED = 9  # a rank called `abort` of the group


@dataclass(frozen=True)
class Failure:
    """The outcome of a failed call, from an engine that is written in Python; see `channel.Outcome`.

    Args:
        said: the library's own message about the failure.
        seen: what was observed of the ranks in `gone`, if it is not certain that they died or that they left.
    """

    code: Code
    said: str = ""
    missing: Sequence[int] = ()
    gone: Sequence[int] = ()
    left: Sequence[int] = ()
    cause: int = -1
    cause_left: bool = False
    reporter: int = -1
    waited_ns: int = 0
    step: int = -1
    split_from: int = -1
    split_to: int = -1
    split_sent: int = -1
    split_expected: int = -1
    calls: Sequence[HeaderFields] = ()
    algorithms: Sequence[int] = ()
    seen: str = ""
    came: bool = False
    waiting: Sequence[int] = ()
    held_by: Sequence[int] = ()
    cause_hung: bool = False


@dataclass(frozen=True)
class Member:
    """A rank of the default group; `process`, if it is known, tells whether the rank's process has ended."""

    rank: int
    host: str
    pid: int
    process: Process | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


MOST_OFFERS = 1 << 16  # the same as kMostOffers in native/executor/messenger.hpp
# Sentences for error messages that state the consequence of a failure.
GROUP_LOST = "This group can no longer be used: destroy it and start again"
MESSAGES_LOST = (
    "No further messages can be sent or received in this group; its collective calls still work. For messages, "
    "destroy it and make a new one"
)
_LEFT = "left the group (its script ended, or it destroyed the process group)"


def to_error(
    outcome: Outcome,
    members: Sequence[Member],
    group_rank: int,
    call: str,
    lost: str = GROUP_LOST,
    everybody: Sequence[Member] = (),
) -> CollectiveError:
    """Returns the error for `outcome`.

    Args:
        outcome: how the call failed.
        members: the group's members, by group rank.
        group_rank: the group rank of this process.
        call: a description of the call that this rank made.
        lost: the consequence of a failure of such a call, as a sentence without its full stop.
        everybody: the engine's members; if empty, `members` are taken for them.
    """
    me = members[group_rank]
    if isinstance(outcome, Failure) and outcome.seen:
        return _not_heard_of(outcome, members, me, call)
    if outcome.code == Code.MISMATCH:
        return _mismatch(outcome, members, me)
    if outcome.code == Code.PEER_LOST:
        return _peer_lost(outcome, members, me, call, everybody or members)
    if outcome.code == Code.ABORTED:
        return _aborted(outcome, members, me, call)
    if outcome.code == Code.TOO_MANY_OFFERS:
        return CollectiveError(
            f"{me}: {call} was not begun: {MOST_OFFERS:,} messages to {members[outcome.missing[0]]} wait for its "
            "receives already; receive there what was sent, or wait for earlier sends first"
        )
    if outcome.code == Code.SCHEDULE_UNFIT:
        return CollectiveError(
            f"{me}: {call} was not begun: step {outcome.step} of its schedule asks for blocks that the call's tensors "
            "do not have, or is another rank's. The other ranks wait in the call until their time-out. If the "
            "algorithm is yours, prove it with paceline.schedule.verify.symbolic.verify; otherwise this is a bug of "
            "Paceline"
        )
    if isinstance(outcome, Failure) and outcome.code == Code.REFUSED:
        return CollectiveError(f"{me}: {call} failed: {outcome.said}. {lost}")
    if outcome.code == Code.STARVED:
        starved = members[outcome.missing[0]]
        if starved is me:
            return CollectiveError(f"{out_of_descriptors(f'{me}', f'the shared tensors of {call}')}. {lost}")
        return CollectiveError(f"{me}: {call} was given up by {starved}, which is out of file descriptors. {lost}")
    if outcome.code == Code.TIMED_OUT:
        return timed_out(outcome, members, group_rank, call, lost, everybody or members)
    missing = _select(members, outcome.missing)
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    where = "" if reporter is me else f" on {reporter}"
    late = "completed it" if outcome.came else "come"
    waiting = f" while {names(missing)} had not {late}" if missing else ""
    return CollectiveError(f"{me}: {call} was interrupted{where}{waiting}. {lost}")


def _peer_lost(
    outcome: Outcome, members: Sequence[Member], me: Member, call: str, everybody: Sequence[Member]
) -> PeerLostError:
    gone = _select(members, outcome.gone)
    cause = everybody[outcome.cause] if 0 <= outcome.cause < len(everybody) else None
    left = list(outcome.gone) == list(outcome.left)
    died = outcome.cause >= 0 and not outcome.cause_left if left else True
    seen = f"{names(gone)} {_LEFT if left else 'died'}"
    first = gone[0]
    if cause is not None and outcome.cause_hung:
        seen += f", after a call had timed out because of {cause}"
    elif cause is not None and left:
        # A rank that leaves because of an error only reports it: the rank that caused the error comes first.
        seen = f"{cause} {_LEFT if outcome.cause_left else 'died'}, and {names(gone)} left the group after that"
        first = cause
    elif cause is not None:
        seen += f", after {cause} {'had left' if outcome.cause_left else 'had died'}"
    if cause is not None and outcome.cause_hung and left:
        advice = f"Look first at {cause}: its process may have been stopped, or its program does something else"
    elif died:
        advice = "Look at its output and, if it was killed, at the memory it used (dmesg)"
    else:
        advice = "Every rank must make the same calls: look at its output, and for a loop that ran fewer times there"
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    by = f"{me}" if reporter is me else f"{reporter}, which told {me}"
    return PeerLostError(
        f"{seen}, seen by {by} in {call}. {advice}. "
        "This group can no longer be used: destroy it and start again without the lost rank or with a new one",
        rank=first.rank,
        host=first.host,
        pid=first.pid,
    )


def _aborted(outcome: Outcome, members: Sequence[Member], me: Member, call: str) -> GroupAbortedError:
    by = me if outcome.reporter < 0 else members[outcome.reporter]
    who = "this process" if by is me else str(by)
    return GroupAbortedError(
        f"{me}: {call} ended without a result, because {who} aborted the group. Its tensors may hold anything; make "
        "a new group of the ranks that are to go on, and repeat the call there",
        rank=by.rank,
    )


def _not_heard_of(outcome: Failure, members: Sequence[Member], me: Member, call: str) -> PeerLostError:
    gone = _select(members, outcome.gone)
    return PeerLostError(
        f"{names(gone)} {outcome.seen}, seen by {me} in {call}. Look at its output, and if its host cannot be "
        f"reached, at the network. {GROUP_LOST}",
        rank=gone[0].rank,
        host=gone[0].host,
        pid=gone[0].pid,
    )


def _mismatch(outcome: Outcome, members: Sequence[Member], me: Member) -> CollectiveMismatchError:
    if outcome.split_from >= 0 and not any(call[0] for call in outcome.calls):
        return _message_mismatch(outcome, members, me)
    # Within a host all ranks see the mismatch in the same call; over links one rank sees it first and ends the group.
    usable = "The group remains usable" if outcome.reporter < 0 else GROUP_LOST
    advice = f"All ranks of a group must make the same calls in the same order. {usable}"
    if outcome.split_from >= 0:
        return CollectiveMismatchError(
            f"{me}: all_to_all's splits do not fit: {members[outcome.split_from]} sends {outcome.split_sent} bytes "
            f"to {members[outcome.split_to]}, which expects {outcome.split_expected}. {advice}"
        )
    latest = max((call[0] for call in outcome.calls), default=0)
    calls: dict[int, str] = {}
    for at, (header, algorithm) in enumerate(zip(outcome.calls, outcome.algorithms, strict=False)):
        if outcome.reporter >= 0 and header[0] != latest:
            continue  # an earlier call of a rank says nothing about the mismatch
        calls[at] = f"{describe_call(header)}{_way(algorithm)}"
    told = by_what(calls, members, "{} called {}")
    return CollectiveMismatchError(f"{me}: the ranks' calls do not fit together: {told}. {advice}")


def _way(algorithm: int) -> str:
    name = name_of(algorithm)
    if name is None:
        return ""
    return f" with wire={name!r}" if name in QUANTISED else f" by {name}"


def _message_mismatch(outcome: Outcome, members: Sequence[Member], me: Member) -> CollectiveMismatchError:
    (*_, sent, _, _, _), (*_, expected, _, _, _) = outcome.calls
    return CollectiveMismatchError(
        f"{me}: a message does not fit its receive: {members[outcome.split_from]} sends {outcome.split_sent} bytes of "
        f"{dtype_name(sent)}, {members[outcome.split_to]} receives {outcome.split_expected} bytes of "
        f"{dtype_name(expected)}. Both need the same type and number of elements; the message is lost, the group "
        "remains usable"
    )


def _select(members: Sequence[Member], group_ranks: Sequence[int]) -> list[Member]:
    return [members[at] for at in group_ranks]
