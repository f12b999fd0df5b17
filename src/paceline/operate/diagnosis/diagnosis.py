"""Works out why a job does not go on or has failed, and whose fault it is, from what is known of its ranks.

`diagnose` takes the first of these that applies: a rank that failed by itself; calls that do not fit together; calls
of different groups that wait for each other; ranks for which others wait; a call in which all ranks are.

Says what a rank does for which others wait: it has ended, is stopped, waits for data, works, or is stuck.

Words how one rank's calls differ from those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.operate.diagnosis.call_history import CallMismatch, Miscount, Slip, difference, miscount
from paceline.operate.diagnosis.finding import (
    Cause,
    Diagnosis,
    absence,
    beginning,
    lasting,
    line_of,
    named,
    verb,
    waiting,
)
from paceline.operate.diagnosis.job_snapshot import (
    STILL,
    ExitReason,
    JobSnapshot,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankState,
    StackLocation,
)
from paceline.operate.diagnosis.slow_links import find_silent_links, find_slow_link
from paceline.operate.diagnosis.wait_graph import CallWait, find_deadlock, roots, waits_of


@dataclass(frozen=True)
class RankAbsence:
    """Why a rank does not come: `doing` continues the sentence that begins with "it"."""

    cause: Cause
    doing: str
    is_fault: bool = True


def explain(rank: RankState) -> RankAbsence:
    """Returns why `rank` does not come."""
    if rank.ending is not None:
        return RankAbsence(_CAUSE_OF_EXIT.get(rank.ending.manner, Cause.EXITED), _end_of(rank))
    process, place = rank.process, rank.place
    if process is not None and process.state is ProcessState.ENDED:
        return RankAbsence(Cause.KILLED, "has ended")
    if process is not None and process.state in STILL:
        cause = Cause.SWAPPING if process.state is ProcessState.SWAPS else Cause.STOPPED
        return RankAbsence(cause, f"{process.state.value}{_remedy(process.state)}{_at(place)}")
    if place is None and process is None and rank.calls:
        last = max(rank.calls, key=lambda call: call.arrived_s)
        return RankAbsence(Cause.USER_CODE, f"made no other call after {last}, and its stack is not known")
    if place is None and process is None:
        return RankAbsence(Cause.UNKNOWN, "left nothing that could be read")
    where = f"is {place}" if place is not None else "is in a place that is not known"
    if process is not None and process.is_busy:
        return RankAbsence(Cause.BUSY, f"{where} and works there ({_work(process)})", is_fault=False)
    if place is not None and place.is_loader:
        return RankAbsence(Cause.LOADER, where)
    return RankAbsence(Cause.USER_CODE, where)


_CAUSE_OF_EXIT = {
    ExitReason.FINISHED: Cause.LEFT,
    ExitReason.EXCEPTION: Cause.EXCEPTION,
    ExitReason.KILLED: Cause.KILLED,
    ExitReason.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
}


def _end_of(rank: RankState) -> str:
    assert rank.ending is not None
    if rank.ending.manner is ExitReason.FINISHED:
        last = max((call.sequence for call in rank.calls), default=0)
        return f"has come to the end of its script{f' after call {last}' if last else ''}"
    return f"has ended ({rank.ending.how})"


def _at(place: StackLocation | None) -> str:
    return f" while it is {place}" if place is not None and (place.what or place.line) else ""


def _remedy(state: ProcessState) -> str:
    return " (`kill -CONT` lets it go on)" if state is ProcessState.STOPPED else ""


def _work(process: ProcessActivity) -> str:
    if process.waited_share > max(0.2, process.cores):
        return f"it waits for a core {min(1.0, process.waited_share):.0%} of the time"
    if process.cores >= 0.2 or process.state is ProcessState.RUNS:
        return f"it uses {process.cores:.1f} cores"
    return "it goes from line to line" if process.moves else "it reads or writes files"


_CAUSE_OF_MISMATCH = {
    Slip.SKIPPED: Cause.SKIPPED,
    Slip.ORDER: Cause.ORDER,
    Slip.TWICE: Cause.TWICE,
    Slip.SKIPPED_OR_TWICE: Cause.SKIPPED_OR_TWICE,
    Slip.OTHER_SHAPE: Cause.OTHER_SHAPE,
    Slip.OTHER_CALL: Cause.OTHER_CALL,
}


def diagnose_mismatch(scene: JobSnapshot, found: CallMismatch) -> Diagnosis:
    """Returns the verdict on ranks whose calls differ from the others'."""
    strays = named(found.strays, scene.word)
    where, there = _where(scene, found.strays), _where(scene, found.regular)
    start = beginning(scene, found.strays) if found.step is None else f"step {found.step}: "
    if found.is_guess:
        sentence = (
            f"{start}call {found.sequence} differs: {named(found.strays[:1], scene.word)} and the others called "
            f"{found.expected} and {found.theirs}, and nothing says which is right"
        )
        return Diagnosis(_CAUSE_OF_MISMATCH[found.slip], found.strays, sentence)
    due = f"where {named(found.regular, scene.word)} called {found.expected}{there}"
    does = {
        Slip.SKIPPED: f"it skipped {found.expected}, or makes it later",
        Slip.ORDER: "it makes its calls in another order",
        Slip.TWICE: f"it made {found.theirs} twice",
        Slip.SKIPPED_OR_TWICE: f"it skipped {found.expected}, or made {found.theirs} twice",
        Slip.OTHER_SHAPE: "the number or type of its elements differs",
        Slip.OTHER_CALL: "it went another way through the program",
    }[found.slip]
    sentence = f"{start}{strays} called {found.theirs} as call {found.sequence}{where}, {due}: {does}"
    return Diagnosis(_CAUSE_OF_MISMATCH[found.slip], found.strays, sentence)


def _where(scene: JobSnapshot, ranks: Sequence[int]) -> str:
    """Returns the user's line in which these ranks made the call, if it is known and the same for all."""
    lines = {line_of(rank) for rank in scene.ranks if rank.rank in ranks} - {""}
    return f" ({lines.pop()})" if len(lines) == 1 else ""


_OWN_FAULTS = {
    ExitReason.EXCEPTION: Cause.EXCEPTION,
    ExitReason.KILLED: Cause.KILLED,
    ExitReason.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitReason.EXITED: Cause.EXITED,
}


# The ranks of several machines are seen one after the other. A call whose last rank has come a moment ago may have
# ended since on those that were seen before.
_SETTLED_S = 5.0

_OTHERS_FAULTS = ("peer_lost", "timed_out", "aborted")


def diagnose(scene: JobSnapshot) -> Diagnosis | None:
    """Returns what is wrong; None if nobody waits and nobody has failed."""
    waits = waits_of(scene)
    return (
        _failed(scene, waits)
        or _unfit(scene)
        or _deadlocked(scene, waits)
        or _missed(scene, waits)
        or _unfinished(scene, waits)
    )


def diagnose_exit(rank: RankState, word: str = "rank") -> Diagnosis | None:
    """Returns how a rank has failed, from what is known of itself alone; None if it has not, or not by itself."""
    return _failed(JobSnapshot(0.0, (rank,), word), ())


def _failed(scene: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames the first rank that failed and was not led to it by another one.

    A program may wrap the error that another rank caused into one of its own.
    """
    failed = [rank for rank in scene.ranks if rank.ending is not None and rank.ending.manner in _OWN_FAULTS]
    if not failed:
        return None
    first = min(failed, key=lambda rank: (_was_led(rank), rank.ending.at_s if rank.ending is not None else 0.0))
    ending = first.ending
    assert ending is not None
    where = f" ({ending.line})" if ending.line else ""
    last = max((call for call in first.calls), key=lambda call: call.arrived_s, default=None)
    after = f", {'in' if last.is_open else 'after'} {last}" if last is not None else ""
    others = [wait for wait in waits if set(wait.waiters) - {first.rank}]
    told = ""
    if others:
        most = max(others, key=lambda wait: len(wait.waiters))
        told = f"; {waiting(scene, most, without=first.rank)}"
    sentence = f"{beginning(scene, [first.rank])}{named([first.rank], scene.word)} failed: {ending.how}{where}{after}"
    return Diagnosis(_OWN_FAULTS[ending.manner], (first.rank,), sentence + told, is_certain=not _was_led(first))


def _was_led(rank: RankState) -> bool:
    """Returns whether a rank raised an exception after its latest call had failed because of another one."""
    latest = max(rank.calls, key=lambda call: call.arrived_s, default=None)
    is_exception = rank.ending is not None and rank.ending.manner is ExitReason.EXCEPTION
    return is_exception and latest is not None and latest.outcome in _OTHERS_FAULTS


def _unfit(scene: JobSnapshot) -> Diagnosis | None:
    """Finds the rank whose call did not fit those of the others."""
    for group in sorted({call.group for rank in scene.ranks for call in rank.calls if call.is_open}):
        histories = _histories(scene, group)
        latest = [max((call.sequence for call in own if call.is_open), default=None) for own in histories.values()]
        numbers = [number for number in latest if number is not None]
        if numbers and (found := difference(histories, min(numbers))) is not None:
            verdict, counted = diagnose_mismatch(scene, found), miscount(histories)
            if counted is None or found.slip in (Slip.OTHER_SHAPE, Slip.OTHER_CALL):
                return verdict
            sentence = f"{verdict.sentence.rpartition(':')[0]}: {_count(counted, scene.word)}"
            return Diagnosis(_cause_of(counted), (counted.rank,), sentence)
    return None


def _histories(scene: JobSnapshot, group: str) -> dict[int, list[RankCall]]:
    return {
        rank.rank: [call for call in rank.calls if call.group == group and not call.is_message]
        for rank in scene.ranks
        if group in rank.seats
    }


def _deadlocked(scene: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Finds calls of different groups, or messages, that wait for each other."""
    ring = find_deadlock(waits, _blocked(scene))
    if not ring:
        return None
    first = min(range(len(ring)), key=lambda at: ring[at].waiters)
    ring = [*ring[first:], *ring[:first]]
    parts = []
    for wait, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        needed = sorted(set(wait.absent) & set(following.waiters))
        seat = next(rank for rank in scene.ranks if rank.rank == wait.waiters[0]).seats[wait.call.group]
        group = f" of the {seat.name or wait.call.group}" if not wait.call.is_message else ""
        parts.append(f"{waiting(scene, wait, of=group)} for {named(needed, scene.word)}")
    blamed = sorted({rank for wait in ring for rank in (*wait.waiters, *wait.absent)})
    sentence = (
        f"{beginning(scene, blamed)}deadlock: {'; '.join(parts)}. All ranks must make the calls in the same order"
    )
    return Diagnosis(Cause.DEADLOCK, tuple(blamed), sentence)


def _blocked(scene: JobSnapshot) -> dict[int, bool]:
    """Returns which ranks can do nothing until a call has ended; a rank whose place is not known is taken for one."""
    return {rank.rank: rank.place is None or rank.place.is_call for rank in scene.ranks}


def _missed(scene: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames a rank for which others wait."""
    by_rank = {rank.rank: rank for rank in scene.ranks}
    for number in roots(waits, _blocked(scene)):
        wait = max((each for each in waits if number in each.absent), key=lambda each: len(each.waiters))
        found = explain(by_rank[number])
        if found.cause is Cause.LEFT or found.cause is Cause.USER_CODE:
            counted = _miscounted(scene, wait)
            if counted is not None:
                return counted
        if found.cause is Cause.LEFT:
            return _left(scene, wait, by_rank[number])
        start = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; "
        others = [rank for rank in wait.absent if rank != number]
        too = f"; {named(others, scene.word)} {verb(len(others), 'are')} not there either" if others else ""
        sentence = start + absence(scene, by_rank[number], found.doing) + too
        if not found.is_fault:
            sentence += ". That is no error if it evaluates, saves or compiles"
        return Diagnosis(found.cause, (number,), sentence, found.is_fault)
    strange = [wait for wait in waits if wait.strangers]
    if not strange:
        return None
    wait = max(strange, key=lambda each: len(each.waiters))
    who = named(wait.strangers, scene.word)
    sentence = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; {who} did not come and left nothing to read"
    return Diagnosis(Cause.UNKNOWN, wait.strangers, sentence, is_certain=False)


def _miscounted(scene: JobSnapshot, wait: CallWait) -> Diagnosis | None:
    """Finds the step in which one rank made more or fewer calls than usual, if all calls look the same."""
    found = miscount(_histories(scene, wait.call.group))
    if found is None:
        return None
    sentence = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; {_count(found, scene.word)}"
    return Diagnosis(_cause_of(found), (found.rank,), sentence)


def _cause_of(found: Miscount) -> Cause:
    return Cause.SKIPPED if found.slip is Slip.SKIPPED else Cause.TWICE


def _count(found: Miscount, word: str) -> str:
    more = "fewer" if found.made < found.usual else "more"
    by = abs(found.made - found.usual)
    return (
        f"{named([found.rank], word)} made {by} {'call' if by == 1 else 'calls'} {more} than the others in step "
        f"{found.step} ({found.made} instead of {found.usual})"
    )


def _left(scene: JobSnapshot, wait: CallWait, rank: RankState) -> Diagnosis:
    """Words that a script has ended while others wait: it made fewer calls, or a single waiter made more."""
    start = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; "
    gone = named(wait.absent, scene.word)
    if len(wait.absent) > len(wait.waiters):
        sentence = f"{start}{gone} {verb(len(wait.absent), 'have')} come to the end of the script without it"
        return Diagnosis(Cause.TWICE, wait.waiters, sentence)
    tie = len(wait.absent) == len(wait.waiters)
    sentence = f"{start}{absence(scene, rank, explain(rank).doing)}: it made fewer calls"
    return Diagnosis(Cause.SKIPPED, tuple(sorted({*wait.waiters, *wait.absent})) if tie else wait.absent, sentence)


def _unfinished(scene: JobSnapshot, waits: Sequence[CallWait]) -> Diagnosis | None:
    """Blames a rank that is stopped in a call to which all have come; otherwise says that the call does not end."""
    complete = [wait for wait in waits if wait.is_complete and not wait.call.is_message]
    if not complete:
        return None
    wait = min(complete, key=lambda each: each.last_s)
    by_rank: Mapping[int, RankState] = {rank.rank: rank for rank in scene.ranks}
    start = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}"
    for number in wait.waiters:
        process = by_rank[number].process
        if process is not None and process.state in STILL:
            found = explain(by_rank[number])
            return Diagnosis(found.cause, (number,), f"{start}; {named([number], scene.word)} {found.doing}")
    took_s = scene.now_s - wait.last_s
    if 0 <= took_s < _SETTLED_S:
        return None
    duration = lasting(took_s)
    ranks = [by_rank[number] for number in wait.waiters]
    sentence = f"{start}; all {wait.members} have come, and it has not ended for {duration}: {_where_to_look(ranks)}"
    return Diagnosis(Cause.NO_PROGRESS, (), sentence)


def _where_to_look(ranks: Sequence[RankState]) -> str:
    """Returns what to look at while a call to which all of these have come does not end."""
    hosts = {rank.rank: rank.host for rank in ranks}
    names = sorted(set(hosts.values()))
    if len(names) < 2:
        return "look where they wait"
    silent = [each for each in find_silent_links(ranks) if each[1] in hosts]
    if silent:
        rank, peer, silent_s = silent[0]
        return (
            f"{hosts[peer]} (rank {peer}) has not answered {hosts[rank]} (rank {rank}) for {lasting(silent_s)}, so "
            "look at the network between them"
        )
    way = find_slow_link(ranks)
    return f"look at the network between {', '.join(names[:4])}{'' if way is None else f'; {way.sentence}'}"
