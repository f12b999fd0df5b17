"""Outcomes of failed calls, and the errors that describe them to the user.

`to_error` builds the error. For a timeout, the message lists the ranks that did not arrive, the ranks that are waiting
in other calls, and the ranks that block all others. `RankIdentity` and `ProcessIdentity` identify ranks and processes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.engine.channel import (
    NO_REDUCTION,
    CallFailure,
    CallOutcome,
    HeaderFields,
    OutcomeCode,
    ReduceOp,
    dtype_name,
)
from paceline.comm.schedule.algorithms import QUANTIZED, name_of
from paceline.comm.schedule.steps import Operation
from paceline.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    PeerLostError,
    and_more,
)
from paceline.linux import out_of_descriptors_error, process_fields

_MOST_NAMED = 4  # maximum number of ranks in a list
_MOST_CALLS = 8  # maximum number of different calls in a message


def describe_call(header: HeaderFields) -> str:
    """Returns a description of a rank's call, such as "all_reduce(float32, 4 elements, SUM) as call 7"."""
    sequence, operation, dtype, reduce_op, root, count = header
    if operation == 0:
        return "no call"
    parts = []
    if operation != Operation.BARRIER:
        parts.append(dtype_name(dtype))
    # In an all_to_all, some engines do not report how many elements the other ranks sent.
    if count or operation not in (Operation.BARRIER, Operation.ALL_TO_ALL):
        parts.append(f"{count} elements")
    if reduce_op != NO_REDUCTION:
        parts.append(ReduceOp(reduce_op).name)
    if root >= 0:
        parts.append(f"root {root}")
    return f"{Operation(operation)}({', '.join(parts)}) as call {sequence}"


def name_ranks(members: Sequence[object]) -> str:
    """Formats the members as human-readable text, truncated if there are many."""
    return and_more(members, _MOST_NAMED)


def describe_ranks(descriptions: Mapping[int, str], members: Sequence[object], form: str) -> str:
    """Formats the ranks' descriptions as human-readable text, grouping ranks that have the same description."""
    alike: dict[str, list[object]] = {}
    for rank, description in descriptions.items():
        alike.setdefault(description, []).append(members[rank])
    clauses = [form.format(name_ranks(ranks), description) for description, ranks in alike.items()]
    more = f"; and {len(clauses) - _MOST_CALLS} more" if len(clauses) > _MOST_CALLS else ""
    return "; ".join(clauses[:_MOST_CALLS]) + more


_ENDED = ("Z", "X")
_STATE, _STARTED = 0, 19  # indices of fields 3 and 22 of proc_pid_stat(5), among the fields after the program's name


@dataclass(frozen=True)
class ProcessIdentity:
    """Unique identity of a process. (A pid alone is valid only within a namespace, and the kernel reuses pids.)

    Args:
        namespace: a string that identifies the host's current boot, the PID namespace and the time namespace.
        started: the start time of the process, in clock ticks of that namespace.
    """

    namespace: str
    pid: int
    started: int

    @staticmethod
    def mine() -> ProcessIdentity:
        """Returns the identity of the calling process."""
        return ProcessIdentity(_namespace(), os.getpid(), int(process_fields("self")[_STARTED]))

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Returns the identity of the process with the given id in the calling process's namespace.

        Raises:
            ProcessLookupError: there is no such process.
        """
        try:
            return ProcessIdentity(_namespace(), pid, int(process_fields(pid)[_STARTED]))
        except FileNotFoundError:
            raise ProcessLookupError(f"process {pid} has ended") from None

    def has_ended(self) -> bool | None:
        """Returns whether the process has exited, or None if the process is on another host or in another namespace."""
        # Under `unshare --pid` without a separate mount of /proc, /proc lists the processes of another namespace.
        if self.namespace != _namespace() or os.readlink("/proc/self") != str(os.getpid()):
            return None
        try:
            stat = process_fields(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat[_STATE] in _ENDED or int(stat[_STARTED]) != self.started


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    clock = Path("/proc/self/ns/time")
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{clock.stat().st_ino if clock.exists() else 0}"


def timed_out(
    outcome: CallOutcome,
    members: Sequence[object],
    group_rank: int,
    call: str,
    lost: str,
    engine_members: Sequence[object],
) -> CollectiveTimeoutError:
    """Returns the error for a timeout; see `to_error`."""
    me = members[group_rank]
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    where = "" if reporter is me else f" on {reporter}"
    outside = [engine_members[rank] for rank in outcome.blocked_by if 0 <= rank < len(engine_members)]
    to_blame = [members[rank] for rank in outcome.missing if rank not in outcome.waiting] + outside
    seen = (
        _incomplete(outcome, members, me, outside)
        if outcome.has_begun
        else _absence(outcome, members, group_rank, to_blame)
    )
    return CollectiveTimeoutError(
        f"{me}: {call} timed out after {outcome.waited_ns / 1e9:.1f} s{where}{seen}. "
        f"{_advice(outcome, to_blame, me)}. {lost}"
    )


def _incomplete(outcome: CallOutcome, members: Sequence[object], me: object, outside: Sequence[object]) -> str:
    """Returns a clause about the ranks that delay a call although all ranks have begun it."""
    others = [members[rank] for rank in outcome.missing if members[rank] is not me]
    mine = ", which was waiting for this rank's part" if len(others) < len(outcome.missing) else ""
    theirs = f"; {name_ranks(others)} reached the call but did not complete it" if others else ""
    beyond = f"; it is delayed by {name_ranks(outside)}" if outside else ""
    return mine + theirs + beyond


def _absence(outcome: CallOutcome, members: Sequence[object], group_rank: int, to_blame: Sequence[object]) -> str:
    if not outcome.missing:
        return "; the engine cannot identify the ranks that did not reach the call"
    me = members[group_rank]
    vain = ", which was waiting for this rank" if group_rank in outcome.missing else ""
    absent = [members[rank] for rank in outcome.missing if rank not in outcome.waiting and rank != group_rank]
    waiting = [members[rank] for rank in outcome.waiting if rank != group_rank]
    parts = [f"; {name_ranks(absent)} did not reach the call"] if absent else []
    why = f"in another call{_held_up_by(to_blame, me)}"
    if waiting:
        parts.append(
            f"; {name_ranks(waiting)} did not reach the call because {'they wait' if waiting[1:] else 'it waits'} {why}"
        )
    if group_rank in outcome.waiting:
        parts.append(f"; this rank waited {why}")
    known = [rank for rank in outcome.missing if rank < len(outcome.calls) and rank != group_rank]
    calls = describe_ranks({rank: f"latest {describe_call(outcome.calls[rank])}" for rank in known}, members, "{}: {}")
    return vain + "".join(parts) + (f" ({calls})" if calls else "")


def _held_up_by(to_blame: Sequence[object], me: object) -> str:
    """Returns a clause about the ranks that directly or indirectly delay a waiting rank's call."""
    if not to_blame:
        return " for ranks that are waiting too"
    others = [member for member in to_blame if member != me]
    if not others:
        return ", which is delayed by this rank"
    mine = "" if len(others) == len(to_blame) else " and this rank"
    return f", which is delayed by {name_ranks(others)}{mine}"


def _advice(outcome: CallOutcome, to_blame: Sequence[object], me: object) -> str:
    if outcome.has_begun:
        return (
            "Either the call needs more time than the timeout allows (raise timeout=), or the process has been stopped "
            "or gets no CPU time (check its state with ps or top)"
        )
    others = [member for member in to_blame if member != me]
    if outcome.waiting and others:
        return (
            f"Look at {name_ranks(others)} first: it took a different path through the program (check where it waits), "
            "it needs more time than the timeout allows (raise timeout=), or its process has been stopped"
        )
    if outcome.waiting and not to_blame:
        return (
            "The ranks wait for each other: all of them must make the calls and messages of all their groups in an "
            "order in which each one can complete"
        )
    return (
        "Either it needs more time than the timeout allows (raise timeout=) or it took a different path through the "
        "program (check where it waits)"
    )


@dataclass(frozen=True)
class RankIdentity:
    """A rank in the default group with its host and process; `process` may be unknown."""

    rank: int
    host: str
    pid: int
    process: ProcessIdentity | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


MOST_OFFERS = 1 << 16  # must equal kMaxOffers in native/executor/messenger.hpp
# The part of an error message that states the consequence of a failure.
GROUP_LOST = "This group can no longer be used: destroy it and start again"
MESSAGES_LOST = (
    "No further messages can be sent or received in this group; its collective calls still work. For messages, destroy "
    "it and create a new one"
)
_LEFT = "left the group (its script ended, or it destroyed the process group)"


def to_error(
    outcome: CallOutcome,
    members: Sequence[RankIdentity],
    group_rank: int,
    call: str,
    lost: str = GROUP_LOST,
    engine_members: Sequence[RankIdentity] = (),
) -> CollectiveError:
    """Returns the error for `outcome`.

    Args:
        call: a description of this rank's call.
        lost: the consequence of the failure, as a sentence without a period.
        engine_members: the members of the engine; if empty, `members` is used.
    """
    me = members[group_rank]
    if isinstance(outcome, CallFailure) and outcome.seen:
        return _silent(outcome, members, me, call)
    if outcome.code == OutcomeCode.MISMATCH:
        return _mismatch(outcome, members, me)
    if outcome.code == OutcomeCode.PEER_LOST:
        return _peer_lost(outcome, members, me, call, engine_members or members)
    if outcome.code == OutcomeCode.ABORTED:
        return _aborted(outcome, members, me, call)
    if outcome.code == OutcomeCode.TOO_MANY_OFFERS:
        return CollectiveError(
            f"{me}: {call} was not started: {MOST_OFFERS:,} messages to {members[outcome.missing[0]]} have not been "
            "received yet; receive them there, or wait for earlier sends first"
        )
    if outcome.code == OutcomeCode.SCHEDULE_UNFIT:
        return CollectiveError(
            f"{me}: {call} was not started: step {outcome.step} of its schedule uses blocks that the call's tensors do "
            "not have, or belongs to another rank. The other ranks wait in the call until their timeout. If the "
            "algorithm is yours, verify it with paceline.comm.schedule.verify.verify; otherwise this is a bug in "
            "Paceline"
        )
    if isinstance(outcome, CallFailure) and outcome.code == OutcomeCode.REFUSED:
        return CollectiveError(f"{me}: {call} failed: {outcome.detail}. {lost}")
    if outcome.code == OutcomeCode.STARVED:
        starved = members[outcome.missing[0]]
        if starved is me:
            return CollectiveError(f"{out_of_descriptors_error(f'{me}', f'the shared tensors of {call}')}. {lost}")
        return CollectiveError(f"{me}: {call} was aborted by {starved}, which has run out of file descriptors. {lost}")
    if outcome.code == OutcomeCode.TIMED_OUT:
        return timed_out(outcome, members, group_rank, call, lost, engine_members or members)
    missing = _select(members, outcome.missing)
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    where = "" if reporter is me else f" on {reporter}"
    late = "completed it" if outcome.has_begun else "reached it"
    waiting = f" while {name_ranks(missing)} had not {late}" if missing else ""
    return CollectiveError(f"{me}: {call} was interrupted{where}{waiting}. {lost}")


def _peer_lost(
    outcome: CallOutcome,
    members: Sequence[RankIdentity],
    me: RankIdentity,
    call: str,
    engine_members: Sequence[RankIdentity],
) -> PeerLostError:
    gone = _select(members, outcome.gone)
    cause = engine_members[outcome.cause] if 0 <= outcome.cause < len(engine_members) else None
    left = list(outcome.gone) == list(outcome.left)
    died = outcome.cause >= 0 and not outcome.cause_left if left else True
    seen = f"{name_ranks(gone)} {_LEFT if left else 'died'}"
    first = gone[0]
    if cause is not None and outcome.cause_hung:
        seen += f", after a call had timed out because of {cause}"
    elif cause is not None and left:
        # The ranks in `gone` left because of an error, so the message begins with the rank that caused it.
        seen = f"{cause} {_LEFT if outcome.cause_left else 'died'}, and {name_ranks(gone)} left the group after that"
        first = cause
    elif cause is not None:
        seen += f", after {cause} {'had left' if outcome.cause_left else 'had died'}"
    if cause is not None and outcome.cause_hung and left:
        advice = f"Look first at {cause}: its process may have been stopped, or its program may be doing something else"
    elif died:
        advice = "Look at its output and, if it was killed, at the memory it used (dmesg)"
    else:
        advice = "Every rank must make the same calls: check its output, and whether a loop ran fewer times there"
    reporter = me if outcome.reporter < 0 else members[outcome.reporter]
    by = f"{me}" if reporter is me else f"{reporter}, which reported it to {me}"
    return PeerLostError(
        f"{seen}, detected by {by} in {call}. {advice}. This group can no longer be used: destroy it and start again "
        "without the lost rank or with a new one",
        rank=first.rank,
        host=first.host,
        pid=first.pid,
    )


def _aborted(outcome: CallOutcome, members: Sequence[RankIdentity], me: RankIdentity, call: str) -> GroupAbortedError:
    by = me if outcome.reporter < 0 else members[outcome.reporter]
    who = "this process" if by is me else str(by)
    return GroupAbortedError(
        f"{me}: {call} did not complete because {who} aborted the group. Its tensors are undefined; create a new group "
        "of the ranks that continue, and repeat the call there",
        rank=by.rank,
    )


def _silent(outcome: CallFailure, members: Sequence[RankIdentity], me: RankIdentity, call: str) -> PeerLostError:
    gone = _select(members, outcome.gone)
    return PeerLostError(
        f"{name_ranks(gone)} {outcome.seen}, detected by {me} in {call}. Look at its output, and if its host cannot be "
        f"reached, at the network. {GROUP_LOST}",
        rank=gone[0].rank,
        host=gone[0].host,
        pid=gone[0].pid,
    )


def _mismatch(outcome: CallOutcome, members: Sequence[RankIdentity], me: RankIdentity) -> CollectiveMismatchError:
    if outcome.split_from >= 0 and not any(call[0] for call in outcome.calls):
        return _message_mismatch(outcome, members, me)
    # Within a host all ranks detect a mismatch in the same call; between hosts one rank detects it and aborts the
    # group.
    usable = "The group remains usable" if outcome.reporter < 0 else GROUP_LOST
    advice = f"All ranks of a group must make the same calls in the same order. {usable}"
    if outcome.split_from >= 0:
        return CollectiveMismatchError(
            f"{me}: all_to_all's splits do not match: {members[outcome.split_from]} sends {outcome.split_sent} bytes "
            f"to {members[outcome.split_to]}, which expects {outcome.split_expected}. {advice}"
        )
    calls = dict(enumerate(zip(outcome.calls, outcome.algorithms, strict=False)))
    if outcome.reporter >= 0:
        calls = {rank: called for rank, called in calls.items() if called[0][0]}
        alternatives = Counter(header[0] for header, _ in set(calls.values()))
        differing = max((number for number, count in alternatives.items() if count > 1), default=None)
        if differing is not None:  # all other calls are unrelated to the mismatch
            calls = {rank: called for rank, called in calls.items() if called[0][0] == differing}
    described = {rank: f"{describe_call(call)}{_by_algorithm(algorithm)}" for rank, (call, algorithm) in calls.items()}
    clauses = describe_ranks(described, members, "{} called {}")
    return CollectiveMismatchError(f"{me}: the ranks' calls do not match: {clauses}. {advice}")


def _by_algorithm(algorithm: int) -> str:
    name = name_of(algorithm)
    if name is None:
        return ""
    return f" with wire={name!r}" if name in QUANTIZED else f" by {name}"


def _message_mismatch(
    outcome: CallOutcome, members: Sequence[RankIdentity], me: RankIdentity
) -> CollectiveMismatchError:
    (*_, sent, _, _, _), (*_, expected, _, _, _) = outcome.calls
    return CollectiveMismatchError(
        f"{me}: a message does not match its receive: {members[outcome.split_from]} sends {outcome.split_sent} bytes "
        f"of {dtype_name(sent)}, {members[outcome.split_to]} receives {outcome.split_expected} bytes of "
        f"{dtype_name(expected)}. Both need the same type and number of elements; the message is lost, the group "
        "remains usable"
    )


def _select(members: Sequence[RankIdentity], group_ranks: Sequence[int]) -> list[RankIdentity]:
    return [members[rank] for rank in group_ranks]
