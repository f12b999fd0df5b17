"""Diagnosis of a job that hangs or has failed: the cause, the ranks at fault, and a message for the user.

`diagnose` checks for these causes in order and reports the first one found: a rank that failed on its own; mismatched
calls; calls in different groups that wait for each other (a deadlock); ranks that others are waiting for; a call that
does not complete although all ranks have entered it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.operate.diagnosis.call_history import (
    CallCountMismatch,
    CallMismatch,
    MismatchKind,
    call_count_mismatch,
    difference,
    root_difference,
)
from paceline.operate.diagnosis.finding import (
    DEFAULT_GROUPS,
    Cause,
    Diagnosis,
    absence,
    beginning,
    during,
    lasting,
    line_of,
    line_of_call,
    named,
    verb,
    waiting,
)
from paceline.operate.diagnosis.job_snapshot import (
    STILL,
    CallSignature,
    ExitReason,
    GroupMembership,
    JobSnapshot,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankState,
    StackLocation,
    is_idle,
)
from paceline.operate.diagnosis.slow_links import find_silent_links, find_slow_link
from paceline.operate.diagnosis.wait_graph import CallWait, find_deadlock, has_abandoned, roots, waits_of

# Minimum time between the last arrival at a call and the report that the call is unfinished. Machines do not take their
# snapshots at exactly the same moment, so a call may have ended on a machine that took its snapshot slightly earlier.
_SETTLED_S = 5.0

_NUMBER = re.compile(r"\d+")
_PLURALS = {"is": "are", "waits": "wait", "has": "have"}
_OTHERS_FAULTS = ("peer_lost", "timed_out", "aborted")

_OWN_FAULTS = {
    ExitReason.EXCEPTION: Cause.EXCEPTION,
    ExitReason.KILLED: Cause.KILLED,
    ExitReason.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitReason.EXITED: Cause.EXITED,
}

_CAUSE_OF_MISMATCH = {
    MismatchKind.SKIPPED: Cause.SKIPPED,
    MismatchKind.ORDER: Cause.ORDER,
    MismatchKind.TWICE: Cause.TWICE,
    MismatchKind.SKIPPED_OR_TWICE: Cause.SKIPPED_OR_TWICE,
    MismatchKind.OTHER_SHAPE: Cause.OTHER_SHAPE,
    MismatchKind.OTHER_CALL: Cause.OTHER_CALL,
}


def diagnose(snapshot: JobSnapshot) -> Diagnosis | None:
    """Returns the diagnosis of a job, or None if no rank is waiting and none has failed."""
    waits = waits_of(snapshot)
    found = (
        _crashed_in_mismatch(snapshot)
        or _left_before_failures(snapshot, waits)
        or _failed(snapshot, waits)
        or _mismatched(snapshot)
        or _mismatched_root(snapshot)
        or _misconfigured(snapshot)
        or _deadlocked(snapshot, waits)
        or _missed(snapshot, waits)
        or _unfinished(snapshot, waits)
        or _without_key(snapshot)
        or _disagreed(snapshot)
        or _idle(snapshot)
    )
    tags = "" if found is None else _different_tags(snapshot, waits)
    return replace(found, sentence=f"{found.sentence}. {tags}") if found is not None and tags else found


def _different_tags(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> str:
    """Returns a sentence about the first recv whose sender has sent a message with another tag, or an empty string."""
    by_rank = snapshot.by_rank
    for wait in waits:
        tag = wait.call.header.tag
        if wait.call.header.operation != "recv" or len(wait.absent) != 1 or len(wait.waiters) != 1:
            continue
        sender, receiver = by_rank[wait.absent[0]], by_rank[wait.waiters[0]]
        sent = _tags(sender, "send", wait.call.group, receiver)
        unreceived = sent - _tags(receiver, "recv", wait.call.group, sender)
        if tag not in sent and (others := [other for other in sent if unreceived[other]]):
            verb_of_wait = "waited" if receiver.ending is not None else "waits"
            return (
                f"{snapshot.word} {sender.rank} sent tag {others[-1]} to {snapshot.word} {receiver.rank}, which "
                f"{verb_of_wait} for tag {tag}"
            )
    return ""


def _tags(rank: RankState, operation: str, group: str, peer: RankState) -> Counter[int]:
    """Counts a rank's recorded messages to or from a peer, by tag."""
    membership = peer.memberships.get(group)
    found = [call.header for call in rank.calls if call.group == group and call.header.operation == operation]
    return Counter(header.tag for header in found if membership is not None and header.peer == membership.number)


def diagnose_exit(rank: RankState, word: str = "rank") -> Diagnosis | None:
    """Diagnoses one rank's failure from its state alone; returns None if another rank caused the failure."""
    return _failed(JobSnapshot(0.0, (rank,), word), ())


@dataclass(frozen=True)
class AbsenceReason:
    """The reason why a rank has not arrived at a call. `doing` completes a sentence that begins with "it"."""

    cause: Cause
    doing: str
    is_fault: bool = True


def _explain_absence(rank: RankState) -> AbsenceReason:
    if rank.ending is not None:
        cause = Cause.LEFT if _has_left(rank) else _OWN_FAULTS.get(rank.ending.manner, Cause.EXCEPTION)
        details = ", ".join(text for text in (rank.ending.how, rank.ending.line) if text)
        return AbsenceReason(cause, f"has ended{f' ({details})' if details else ''}")
    process, place = rank.process, rank.place
    if process is not None and process.state is ProcessState.ENDED:
        return AbsenceReason(Cause.KILLED, "has ended")
    if process is not None and process.state in STILL:
        cause = Cause.SWAPPING if process.state is ProcessState.SWAPS else Cause.STOPPED
        remedy = " (`kill -CONT` resumes it)" if process.state is ProcessState.STOPPED else ""
        where = f" while it is {place}" if place is not None and (place.what or place.line) else ""
        return AbsenceReason(cause, f"{process.state.value}{remedy}{where}")
    if place is None and process is None and (last := rank.latest_call) is not None:
        return AbsenceReason(Cause.USER_CODE, f"made no other call after {last}, and its stack is unknown")
    if place is None and process is None:
        return AbsenceReason(Cause.UNKNOWN, "left no readable recording")
    if rank.store_wait is not None:
        return AbsenceReason(Cause.STORE, f"waits in {_store_wait(rank)}")
    where = f"is {place}" if place is not None else "is at an unknown location"
    if process is not None and process.reads_stdin:
        remedy = " (type the input, or start the job with `< /dev/null` if it needs none)"
        return AbsenceReason(
            Cause.INPUT, f"waits for input{f' at {place.line}' if place and place.line else ''}{remedy}"
        )
    if process is not None and process.is_busy_at(place or StackLocation()):
        return AbsenceReason(Cause.BUSY, f"{where} and is working ({_work(process, place)})", is_fault=False)
    if place is not None and place.is_loader:
        return AbsenceReason(Cause.LOADER, where)
    return AbsenceReason(Cause.USER_CODE, where)


def _store_wait(rank: RankState) -> str:
    """Describes a rank's wait in a store call, with the source line: `store.get (train.py:9) for the key 'ready', which
    ...`."""
    method, _, keys = str(rank.store_wait).partition(" ")
    line = line_of(rank)
    return f"{method}{f' ({line})' if line else ''}{keys and f' {keys}'}"


def _work(process: ProcessActivity, place: StackLocation | None) -> str:
    if place is not None and place.activity == "compiles":
        return "it compiles"
    if process.waited_share > max(0.2, process.cores):
        return f"it waits for a core {min(1.0, process.waited_share):.0%} of the time"
    if process.cores >= 0.2 or process.state is ProcessState.RUNS:
        return f"it uses {process.cores:.1f} cores" if process.cores >= 0.05 else "it waits for a core"
    if process.moves:
        return "it moves from line to line"
    if process.child:
        return f"it runs other programs, such as {process.child}"
    if place is not None and place.activity and process.disk_bytes_s < 1 << 17:
        return f"it {place.activity}"
    return "it reads or writes files"


def _diagnose_mismatch(snapshot: JobSnapshot, group: str, found: CallMismatch) -> Diagnosis:
    deviating = named(found.deviating, snapshot.word)
    where = _where(snapshot, found.deviating, group, found.sequence)
    elsewhere = _where(snapshot, found.regular, group, found.sequence)
    start = beginning(snapshot, found.deviating) if found.step is None else f"step {found.step}: "
    if found.is_guess:
        made = _made_by(snapshot, group, found.sequence)
        parts = [
            f"{named(ranks, snapshot.word)} called {header}{_where(snapshot, ranks, group, found.sequence)}"
            for header, ranks in made.items()
        ]
        sentence = f"{start}call {found.sequence} differs: {', '.join(parts)}, and it is not known which is correct"
        return Diagnosis(_CAUSE_OF_MISMATCH[found.kind], found.deviating, sentence)
    due = f"where {named(found.regular, snapshot.word)} called {found.expected}{elsewhere}"
    does = {
        MismatchKind.SKIPPED: f"it skipped {found.expected}, or calls it later",
        MismatchKind.ORDER: "it makes its calls in a different order",
        MismatchKind.TWICE: f"it called {found.theirs} twice",
        MismatchKind.SKIPPED_OR_TWICE: f"it skipped {found.expected}, or called {found.theirs} twice",
        MismatchKind.OTHER_SHAPE: _difference_in(found.theirs, found.expected),
        MismatchKind.OTHER_CALL: "it took a different path through the program",
    }[found.kind]
    handled = _handled(snapshot, found.deviating[0]) if len(found.deviating) == 1 else ""
    sentence = f"{start}{deviating} called {found.theirs} as call {found.sequence}{where}{handled}, {due}: {does}"
    return Diagnosis(_CAUSE_OF_MISMATCH[found.kind], found.deviating, sentence)


def _handled(snapshot: JobSnapshot, number: int) -> str:
    """Describes the exception that caused a rank to make a different call, for example in a `finally` clause."""
    ending = next((rank.ending for rank in snapshot.ranks if rank.rank == number), None)
    return f" while it handled {ending.handled}" if ending is not None and ending.handled else ""


def _difference_in(theirs: CallSignature, expected: CallSignature) -> str:
    """Describes the difference between the arguments of two calls to the same operation."""
    if (theirs.dtype, theirs.count) != (expected.dtype, expected.count):
        return "the number or type of its elements differs"
    return "its root differs" if theirs.root != expected.root else "its reduction differs"


def _made_by(snapshot: JobSnapshot, group: str, sequence: int) -> dict[CallSignature, list[int]]:
    """Returns the variants of a call, with the ranks that made each of them."""
    made: dict[CallSignature, list[int]] = {}
    for rank in snapshot.ranks:
        for call in rank.calls:
            if (call.group, call.sequence) == (group, sequence) and not call.is_message:
                made.setdefault(call.header, []).append(rank.rank)
                break
    return made


def _where(snapshot: JobSnapshot, ranks: Sequence[int], group: str, sequence: int) -> str:
    """Returns the line in the user's program at which these ranks made the call, if it is the same for all of them."""
    lines = {line_of_call(rank, group, sequence) for rank in snapshot.ranks if rank.rank in ranks} - {""}
    return f" ({lines.pop()})" if len(lines) == 1 else ""


def _failed(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames the first rank that failed independently of the other ranks.

    A program can wrap an error caused by another rank in an exception of its own. Ranks with such exceptions are blamed
    only if no other rank failed.
    """
    failed = [rank for rank in snapshot.ranks if rank.manner in _OWN_FAULTS]
    if not failed:
        return None
    first = min(failed, key=lambda rank: (_is_consequence(rank), rank.ending.at_s if rank.ending is not None else 0.0))
    ending = first.ending
    assert ending is not None
    where = f" ({ending.line})" if ending.line else ""
    where += f" while it handled {ending.handled}" if ending.handled else ""
    last = first.latest_call
    after = f", {'in' if last.is_open else 'after'} {last}" if last is not None else ""
    if last is not None and last.line and not ending.line:
        after += f" ({last.line})"
    alike = [rank for rank in failed if _failed_alike(rank, first)]
    if len(alike) > 1:
        numbers = [rank.rank for rank in alike]
        sentence = (
            f"{beginning(snapshot, numbers)}{named(numbers, snapshot.word)} failed in the same way, "
            f"{named([first.rank], snapshot.word)} first: {ending.how}{where}{after}"
        )
        return Diagnosis(_OWN_FAULTS[ending.manner], tuple(numbers), sentence, is_certain=not _is_consequence(first))
    others = [wait for wait in waits if set(wait.waiters) - {first.rank}]
    sentence = (
        f"{beginning(snapshot, [first.rank])}{named([first.rank], snapshot.word)} failed: {ending.how}{where}{after}"
    )
    if others:
        most = max(others, key=lambda wait: len(wait.waiters))
        sentence += f"; {waiting(snapshot, most, without=first.rank)}"
    return Diagnosis(_OWN_FAULTS[ending.manner], (first.rank,), sentence, is_certain=not _is_consequence(first))


def _crashed_in_mismatch(snapshot: JobSnapshot) -> Diagnosis | None:
    """Diagnoses a process that a library such as gloo terminated because the ranks' calls did not match."""
    crashed = [
        rank
        for rank in snapshot.ranks
        if rank.manner is ExitReason.KILLED and any(call.ended_s is None for call in rank.calls)
    ]
    verdict = _mismatched(snapshot) if crashed else None
    if verdict is None:
        return None
    ends = [f"{named([rank.rank], snapshot.word)} was {rank.ending.how}" for rank in crashed if rank.ending is not None]
    return replace(verdict, sentence=f"{verdict.sentence}; {' and '.join(ends)}")


def _left_before_failures(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames a rank that exited early, if the program wrapped the errors of the waiting ranks in its own exceptions."""
    failed = [rank for rank in snapshot.ranks if rank.manner in _OWN_FAULTS]
    if not failed or not all(map(_is_consequence, failed)):
        return None
    missed = _missed(snapshot, waits)
    return missed if missed is not None and missed.is_early_exit else None


def _failed_alike(one: RankState, other: RankState) -> bool:
    """Returns True if two ranks raised the same exception on the same line, ignoring numbers in the message."""
    if one.ending is None or other.ending is None or other.ending.manner is not ExitReason.EXCEPTION:
        return False
    texts = [_NUMBER.sub("0", ending.how) for ending in (one.ending, other.ending)]
    return (one.ending.manner, one.ending.line, texts[0]) == (other.ending.manner, other.ending.line, texts[1])


def _is_consequence(rank: RankState) -> bool:
    """Returns True if another rank's failure broke this rank's latest call and this rank then raised an exception."""
    latest = rank.latest_call
    return rank.manner is ExitReason.EXCEPTION and latest is not None and latest.outcome in _OTHERS_FAULTS


def _mismatched(snapshot: JobSnapshot) -> Diagnosis | None:
    """Finds the rank whose call does not match the calls of the other ranks."""
    for group in sorted({call.group for rank in snapshot.ranks for call in rank.calls if call.is_open}):
        histories = _histories(snapshot, group)
        latest = [max((call.sequence for call in own if call.is_open), default=None) for own in histories.values()]
        numbers = [number for number in latest if number is not None]
        if numbers and (found := difference(histories, min(numbers))) is not None:
            verdict, counted = _diagnose_mismatch(snapshot, group, found), call_count_mismatch(histories)
            if counted is None or found.kind in (MismatchKind.OTHER_SHAPE, MismatchKind.OTHER_CALL):
                return verdict
            sentence = f"{verdict.sentence.rpartition(':')[0]}: {_count(counted, snapshot.word)}"
            return Diagnosis(_cause_of(counted), (counted.rank,), sentence)
    return None


def _mismatched_root(snapshot: JobSnapshot) -> Diagnosis | None:
    """Finds the rank that passed a different root to an earlier call.

    Between hosts, such a call can complete on all ranks, and then a later call fails although all ranks make it.
    """
    if all(rank.manner is not ExitReason.MISMATCH for rank in snapshot.ranks):
        return None
    for group in sorted({call.group for rank in snapshot.ranks for call in rank.calls}):
        found = root_difference(_histories(snapshot, group))
        if found is not None:
            return _diagnose_mismatch(snapshot, group, found)
    return None


def _histories(snapshot: JobSnapshot, group: str) -> dict[int, list[RankCall]]:
    return {
        rank.rank: [call for call in rank.calls if call.group == group and not call.is_message]
        for rank in snapshot.ranks
        if group in rank.memberships
    }


def _misconfigured(snapshot: JobSnapshot) -> Diagnosis | None:
    """Diagnoses ranks that initialize the default group with different world sizes, or with the same rank.

    A program can divide its ranks into several smaller worlds, so at least one rank must expect all ranks.
    """
    if snapshot.word != "rank":  # in an elastic job, slots are numbered differently from ranks
        return None
    joining: dict[int, tuple[GroupMembership, str]] = {}
    for rank in snapshot.ranks:
        for call in rank.calls:
            membership = rank.memberships.get(call.group)
            if (
                call.is_formation
                and call.ended_s is None
                and membership is not None
                and membership.name in DEFAULT_GROUPS
            ):
                joining[rank.rank] = membership, call.line or line_of(rank)
    by_size: dict[int, list[int]] = {}
    by_number: dict[int, list[int]] = {}
    for number, (membership, _) in joining.items():
        by_size.setdefault(membership.size, []).append(number)
        by_number.setdefault(membership.number, []).append(number)
    lines = {line for _, line in joining.values()}
    where = f" ({lines.pop()})" if len(lines) == 1 and "" not in lines else ""
    if len(snapshot.ranks) not in by_size:
        return None
    if len(by_size) > 1:
        ranks = [f"{named(numbers)} {verb(len(numbers), 'have')} {size}" for size, numbers in sorted(by_size.items())]
        deviating = [rank for size, numbers in by_size.items() if size != len(snapshot.ranks) for rank in numbers]
        sentence = (
            f"the world sizes passed to init_process_group(){where} differ: {', '.join(ranks)}; all ranks must have "
            "the same. Check WORLD_SIZE and the argument world_size"
        )
        return Diagnosis(Cause.OTHER_SHAPE, tuple(sorted(deviating)), sentence)
    for number, processes in by_number.items():
        if len(processes) > 1:
            deviating = [rank for rank in processes if rank != number] if number in processes else processes
            sentence = (
                f"the processes of {named(processes)} wait in init_process_group(){where}, and all of them have called "
                f"it as rank {number}; each must have a different rank. Check RANK and the argument rank"
            )
            return Diagnosis(Cause.OTHER_SHAPE, tuple(sorted(deviating)), sentence)
    return None


def _deadlocked(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Finds calls in different groups, or messages, that wait for each other."""
    cycle = find_deadlock(waits, _blocked(snapshot))
    if not cycle:
        return None
    first = min(range(len(cycle)), key=lambda index: cycle[index].waiters)
    cycle = [*cycle[first:], *cycle[:first]]
    parts = []
    for wait, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        needed = sorted(set(wait.absent) & set(following.waiters))
        membership = next(rank for rank in snapshot.ranks if rank.rank == wait.waiters[0]).memberships[wait.call.group]
        name = "default group" if membership.name in DEFAULT_GROUPS else membership.name or wait.call.group
        group = f" of the {name}" if not wait.call.is_message else ""
        parts.append(f"{waiting(snapshot, wait, of=group)} for {named(needed, snapshot.word)}")
    blamed = sorted({rank for wait in cycle for rank in (*wait.waiters, *wait.absent)})
    advice = "All ranks must make the calls in the same order"
    if all(wait.call.is_message for wait in cycle):
        advice = "Each message needs a send and a recv with the same tag"
    if all(wait.is_formation for wait in cycle):
        advice = "All ranks must create all groups in the same order, including those that they are not members of"
    sentence = f"{beginning(snapshot, blamed)}deadlock: {'; '.join(parts)}. {advice}"
    return Diagnosis(Cause.DEADLOCK, tuple(blamed), sentence)


def _blocked(snapshot: JobSnapshot) -> dict[int, bool]:
    """Returns whether each rank is blocked in a call. Ranks with an unknown location are assumed to be blocked."""
    return {rank.rank: rank.place is None or rank.place.is_call for rank in snapshot.ranks}


def _missed(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames a rank that others are waiting for."""
    by_rank = snapshot.by_rank
    found_roots = roots(waits, _blocked(snapshot))
    # Another absent rank may be the one that should set the key for which a rank waits.
    for number in sorted(found_roots, key=lambda number: by_rank[number].store_wait is not None):
        wait = max((wait for wait in waits if number in wait.absent), key=lambda wait: len(wait.waiters))
        found = _explain_absence(by_rank[number])
        if found.cause is Cause.LEFT or found.cause is Cause.USER_CODE:
            counted = _miscounted(snapshot, wait)
            if counted is not None:
                return counted
        if found.cause is Cause.LEFT:
            return _left(snapshot, wait, by_rank[number])
        if found.is_fault and _makes_other_calls(snapshot, by_rank[number], wait):
            doing = f"{found.doing} and is making other calls, most recently {by_rank[number].latest_call}"
            found = AbsenceReason(Cause.BUSY, doing, is_fault=False)
            by_rank[number] = replace(by_rank[number], since_s=None)  # the time since its latest call is not meaningful
        start = f"{beginning(snapshot, wait.waiters)}{waiting(snapshot, wait)}; "
        others = [rank for rank in wait.absent if rank != number]
        too = f"; {named(others, snapshot.word)} {verb(len(others), 'have')} not reached it either" if others else ""
        for rank in others:
            if by_rank[rank].store_wait is not None:
                too += f"; {named([rank], snapshot.word)} waits in {_store_wait(by_rank[rank])}"
        doing = _destroyed(by_rank[number], wait, found.doing) or found.doing
        place = by_rank[number].place
        if wait.is_formation and place is not None and place.what.endswith(".init_process_group"):
            own = f"{named([number], snapshot.word)} has called it too"
            advice = "check MASTER_ADDR, MASTER_PORT and the network there"
            sentence = f"{start}{own}, but has not connected to the others ({place.line}): {advice}{too}"
        else:
            sentence = start + absence(snapshot, by_rank[number], doing) + _thread_error(by_rank[number]) + too
        if not found.is_fault:
            sentence += ". This is not an error if it evaluates, saves or compiles"
        return Diagnosis(found.cause, (number,), sentence, found.is_fault)
    unknown = [wait for wait in waits if wait.strangers]
    if not unknown:
        return None
    wait = max(unknown, key=lambda wait: len(wait.waiters))
    who = named(wait.strangers, snapshot.word)
    sentence = (
        f"{beginning(snapshot, wait.waiters)}{waiting(snapshot, wait)}; {who} did not reach this call and left no "
        "recording"
    )
    if wait.is_formation and min(wait.strangers) >= len(snapshot.ranks) == len(wait.waiters):
        sentence += f". Check that world_size is not greater than the number of {snapshot.word}s that were started"
    return Diagnosis(Cause.UNKNOWN, wait.strangers, sentence, is_certain=False)


def _thread_error(rank: RankState) -> str:
    """Describes the exception that ended one of a rank's threads, because the rank might depend on that thread."""
    return f"; one of its threads has ended with {rank.thread_error}" if rank.thread_error else ""


def _makes_other_calls(snapshot: JobSnapshot, rank: RankState, wait: CallWait) -> bool:
    """Returns True if a rank has been making calls for most of the time that others have been waiting for it."""
    last = rank.latest_call
    waited_s = snapshot.now_s - wait.since_s
    return rank.ending is None and last is not None and last.arrived_s > wait.since_s + 0.5 * waited_s


def _destroyed(rank: RankState, wait: CallWait, doing: str) -> str:
    """Describes a rank that has destroyed a group in which others wait for it; returns "" for other ranks."""
    membership = rank.memberships.get(wait.call.group)
    if membership is None or not membership.is_closed or rank.ending is not None:
        return ""
    last = rank.latest_call
    if rank.place is not None or last is None:
        return f"has destroyed the group and {doing}"
    return f"has destroyed the group after {last}{f' ({last.line})' if last.line else ''}"


def _miscounted(snapshot: JobSnapshot, wait: CallWait) -> Diagnosis | None:
    """Finds a step in which one rank made an unusual number of calls, even if all of the calls look the same."""
    found = call_count_mismatch(_histories(snapshot, wait.call.group))
    if found is None:
        return None
    sentence = f"{beginning(snapshot, wait.waiters)}{waiting(snapshot, wait)}; {_count(found, snapshot.word)}"
    return Diagnosis(_cause_of(found), (found.rank,), sentence)


def _cause_of(found: CallCountMismatch) -> Cause:
    return Cause.SKIPPED if found.kind is MismatchKind.SKIPPED else Cause.TWICE


def _count(found: CallCountMismatch, word: str) -> str:
    more = "fewer" if found.made < found.usual else "more"
    by = abs(found.made - found.usual)
    return (
        f"{named([found.rank], word)} made {by} {'call' if by == 1 else 'calls'} {more} than the others in step "
        f"{found.step} ({found.made} instead of {found.usual})"
    )


def _left(snapshot: JobSnapshot, wait: CallWait, rank: RankState) -> Diagnosis:
    """Diagnoses an early exit: the ranks that exited made too few calls, or a few waiting ranks made too many."""
    start = beginning(snapshot, wait.waiters)
    left = [other.rank for other in snapshot.ranks if other.rank in wait.absent and _has_left(other)]
    if len(left) > len(wait.waiters):
        sentence = (
            f"{start}{waiting(snapshot, wait)}; {named(left, snapshot.word)} {verb(len(left), 'have')} finished the "
            "script without it"
        )
        return Diagnosis(Cause.TWICE, wait.waiters, sentence)
    # While other absent ranks are running, the waiting ranks may turn out to have made one call too many.
    undecided = [other.rank for other in snapshot.ranks if other.rank in wait.absent and other.ending is None]
    last = rank.latest_call
    where = f" ({last.line})" if last is not None and last.line else ""
    is_abandoned = last is not None and has_abandoned(rank, last)
    after = f" {'before' if is_abandoned else 'after'} {last}{where}" if last is not None else ""
    after += " had completed" if is_abandoned else ""
    lines = {other.ending.line for other in snapshot.ranks if other.rank in left and other.ending is not None}
    exit_line = lines.pop() if len(lines) == 1 else ""
    code = f"exit code 0 (sys.exit or SystemExit at {exit_line})" if exit_line else "exit code 0"
    sentence = (
        f"{start}{named(left, snapshot.word)} exited too early, with {code}{after}: {waiting(snapshot, wait)}. "
        "Look for a loop with fewer iterations there, or for an exit before the last call"
    )
    if len(left) == len(wait.waiters):
        sentence += f", or for a call that only {named(wait.waiters, snapshot.word)} {verb(len(left), 'make')}"
    return Diagnosis(Cause.LEFT, tuple(left), sentence, is_certain=not undecided)


def _has_left(rank: RankState) -> bool:
    return rank.manner is ExitReason.FINISHED


def _unfinished(snapshot: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Diagnoses a call that all ranks have entered: blames a stopped rank, or reports the call as unfinished."""
    complete = [wait for wait in waits if wait.is_complete and not wait.call.is_message]
    if not complete:
        return None
    wait = min(complete, key=lambda wait: wait.last_s)
    by_rank = snapshot.by_rank
    start = f"{beginning(snapshot, wait.waiters)}{waiting(snapshot, wait)}"
    for number in wait.waiters:
        process = by_rank[number].process
        if process is not None and process.state in STILL:
            found = _explain_absence(by_rank[number])
            return Diagnosis(found.cause, (number,), f"{start}; {named([number], snapshot.word)} {found.doing}")
    took_s = snapshot.now_s - wait.last_s
    if 0 <= took_s < _SETTLED_S:
        return None
    if wait.call.device:
        return _unfinished_on_devices(snapshot, wait, [by_rank[number] for number in wait.waiters])
    advice = _where_to_look([by_rank[number] for number in wait.waiters])
    sentence = (
        f"{start}; all {wait.members} have reached the call, and it has not completed for {lasting(took_s)}: {advice}"
    )
    return Diagnosis(Cause.NO_PROGRESS, (), sentence)


def _disagreed(snapshot: JobSnapshot) -> Diagnosis | None:
    """Describes an error that all ranks raised because they passed different arguments to a Paceline object."""
    failed = [
        rank
        for rank in snapshot.ranks
        if rank.ending is not None and rank.ending.manner is ExitReason.MISMATCH and rank.ending.line
    ]
    if not failed:
        return None
    first = min(failed, key=lambda rank: rank.ending.at_s if rank.ending is not None else 0.0)
    assert first.ending is not None
    numbers, line = [rank.rank for rank in failed], first.ending.line
    sentence = f"{beginning(snapshot, numbers)}{named(numbers, snapshot.word)} disagreed ({line}): {first.ending.how}"
    return Diagnosis(Cause.OTHER_SHAPE, tuple(numbers), sentence)


def _without_key(snapshot: JobSnapshot) -> Diagnosis | None:
    """Diagnoses ranks that wait for keys in a store: blames the other ranks, which may be expected to set the keys."""
    running = [rank for rank in snapshot.ranks if rank.ending is None]
    least_s = 0.0 if all(is_idle(rank) for rank in running) else _SETTLED_S
    waiters = [
        rank for rank in running if rank.store_wait is not None and snapshot.now_s - rank.store_wait.since_s >= least_s
    ]
    if not waiters:
        return None
    by_wait: dict[str, list[RankState]] = {}
    for rank in waiters:
        by_wait.setdefault(_store_wait(rank), []).append(rank)
    parts = []
    for text, ranks in by_wait.items():
        since_s = min(rank.store_wait.since_s for rank in ranks if rank.store_wait is not None)
        who, verb_ = named([rank.rank for rank in ranks], snapshot.word), verb(len(ranks), "wait")
        parts.append(f"{who} {verb_} in {text}, for {lasting(snapshot.now_s - since_s)}")
    others = [rank for rank in snapshot.ranks if rank not in waiters]
    found = {rank.rank: _explain_absence(rank) for rank in others}
    parts += _activities(found, snapshot.word)
    is_fault = all(reason.is_fault for reason in found.values())
    advice = ". This is not an error if it evaluates, saves or compiles" if not is_fault else ""
    if not others:
        advice = ". All ranks wait, so none can set a key"
    sentence = f"{beginning(snapshot, [rank.rank for rank in waiters])}{'; '.join(parts)}{advice}"
    cause = next(iter(found.values())).cause if len(others) == 1 else Cause.STORE
    return Diagnosis(cause, tuple(rank.rank for rank in others or waiters), sentence, is_fault)


def _idle(snapshot: JobSnapshot) -> Diagnosis | None:
    """Describes a job in which no rank is making a call or working, for example because all ranks wait for a file."""
    running = [rank for rank in snapshot.ranks if rank.ending is None]
    if not running or len(running) < len(snapshot.ranks) or not all(is_idle(rank) for rank in running):
        return None
    found = {rank.rank: _explain_absence(rank) for rank in running}
    since_s = max((rank.since_s for rank in running if rank.since_s is not None), default=snapshot.now_s)
    still = [number for number, absence_of in found.items() if absence_of.cause not in (Cause.USER_CODE, Cause.UNKNOWN)]
    sentence = (
        f"{beginning(snapshot, list(found))}no {snapshot.word} has made a call or worked for "
        f"{lasting(snapshot.now_s - since_s)}: {'; '.join(_activities(found, snapshot.word))}"
    )
    with_errors = [rank for rank in running if rank.thread_error]
    if with_errors:
        who = named([rank.rank for rank in with_errors], snapshot.word)
        sentence += f"; a thread of {who} has ended with {with_errors[0].thread_error}"
    blamed = tuple(still) if len(still) < len(running) else ()
    return Diagnosis(found[still[0]].cause if still else Cause.IDLE, blamed, sentence, is_fault=False)


def _activities(found: Mapping[int, AbsenceReason], word: str) -> list[str]:
    """Describes what the ranks do, with one text for all ranks that do the same."""
    doings: dict[str, list[int]] = {}
    for number, reason in found.items():
        doings.setdefault(reason.doing, []).append(number)
    return [
        f"{named(numbers, word)} {doing if len(numbers) == 1 else _in_plural(doing)}"
        for doing, numbers in doings.items()
    ]


def _in_plural(doing: str) -> str:
    first, _, rest = doing.partition(" ")
    return f"{_PLURALS.get(first, first)} {rest}"


def _unfinished_on_devices(snapshot: JobSnapshot, wait: CallWait, ranks: Sequence[RankState]) -> Diagnosis:
    """Blames ranks whose devices have not reached a call, although the program has made the call on every rank."""
    start = f"{beginning(snapshot, wait.waiters)}{waiting(snapshot, wait)}"
    late = [rank for rank in ranks if rank.rank in wait.unreached]
    if not late:
        sentence = (
            f"{start}; all {wait.members} have reached the call, and all devices have been executing it for "
            f"{lasting(snapshot.now_s - wait.last_s)} without completing it: {_where_to_look(ranks)}"
        )
        return Diagnosis(Cause.NO_PROGRESS, (), sentence)
    numbers = [rank.rank for rank in late]
    known = next((rank for rank in late if rank.phase is not None), None)
    work = f"{during(known)}" if known is not None else "busy with the work before it"
    since_s = wait.last_s if known is None or known.phase is None else known.phase.since_s
    who, have = named(numbers, snapshot.word), verb(len(numbers), "have")
    devices = "its device is" if len(numbers) == 1 else "their devices are"
    sentence = (
        f"{start}; {who} {have} reached the call, but {devices} still {work}, for "
        f"{lasting(snapshot.now_s - since_s)}: either this work takes that long, or one of its kernels does not "
        "terminate"
    )
    blamed = tuple(numbers) if len(late) < len(ranks) else ()
    return Diagnosis(Cause.DEVICE_BUSY, blamed, sentence, is_fault=False)


def _where_to_look(ranks: Sequence[RankState]) -> str:
    """Returns advice about a call that does not complete although all of these ranks have arrived."""
    hosts = {rank.rank: rank.host for rank in ranks}
    names = sorted(set(hosts.values()))
    if len(names) < 2:
        return "check where they wait"
    silent = [link for link in find_silent_links(ranks) if link[1] in hosts]
    if silent:
        rank, peer, silent_s = silent[0]
        return (
            f"{hosts[peer]} (rank {peer}) has not answered {hosts[rank]} (rank {rank}) for {lasting(silent_s)}, so "
            "look at the network between them"
        )
    slow = find_slow_link(ranks)
    return f"look at the network between {', '.join(names[:4])}{'' if slow is None else f'; {slow.sentence}'}"
