"""Works out why a job does not go on or has failed, and whose fault it is, from what is known of its ranks.

`diagnose` takes the first of these that applies: a rank that failed by itself; calls that do not fit together; calls
of different groups that wait for each other; ranks for which others wait; a call in which all ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.observe.absences import explain
from paceline.observe.evidence import STILL, Call, Manner, Rank, Scene
from paceline.observe.histories import Miscount, Slip, difference, miscount
from paceline.observe.sentences import absence, beginning, lasting, named, verb, waiting
from paceline.observe.unfit import of_difference
from paceline.observe.verdict import Cause, Verdict
from paceline.observe.waiting import Wait, circle, roots, waits_of
from paceline.observe.ways import silent_ways, slow_way

_OWN_FAULTS = {
    Manner.EXCEPTION: Cause.EXCEPTION,
    Manner.KILLED: Cause.KILLED,
    Manner.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    Manner.EXITED: Cause.EXITED,
}


# The ranks of several machines are seen one after the other. A call whose last rank has come a moment ago may have
# ended since on those that were seen before.
_SETTLED_S = 5.0

_OTHERS_FAULTS = ("peer_lost", "timed_out", "aborted")


def diagnose(scene: Scene) -> Verdict | None:
    """Returns what is wrong; None if nobody waits and nobody has failed."""
    waits = waits_of(scene)
    return (
        _failed(scene, waits)
        or _unfit(scene)
        or _deadlocked(scene, waits)
        or _missed(scene, waits)
        or _unfinished(scene, waits)
    )


def died(rank: Rank, word: str = "rank") -> Verdict | None:
    """Returns how a rank has failed, from what is known of itself alone; None if it has not, or not by itself."""
    return _failed(Scene(0.0, (rank,), word), ())


def _failed(scene: Scene, waits: Sequence[Wait]) -> Verdict | None:
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
    return Verdict(_OWN_FAULTS[ending.manner], (first.rank,), sentence + told, is_certain=not _was_led(first))


def _was_led(rank: Rank) -> bool:
    """Returns whether a rank raised an exception after its latest call had failed because of another one."""
    latest = max(rank.calls, key=lambda call: call.arrived_s, default=None)
    is_exception = rank.ending is not None and rank.ending.manner is Manner.EXCEPTION
    return is_exception and latest is not None and latest.outcome in _OTHERS_FAULTS


def _unfit(scene: Scene) -> Verdict | None:
    """Finds the rank whose call did not fit those of the others."""
    for group in sorted({call.group for rank in scene.ranks for call in rank.calls if call.is_open}):
        histories = _histories(scene, group)
        latest = [max((call.sequence for call in own if call.is_open), default=None) for own in histories.values()]
        numbers = [number for number in latest if number is not None]
        if numbers and (found := difference(histories, min(numbers))) is not None:
            verdict, counted = of_difference(scene, found), miscount(histories)
            if counted is None or found.slip in (Slip.OTHER_SHAPE, Slip.OTHER_CALL):
                return verdict
            sentence = f"{verdict.sentence.rpartition(':')[0]}: {_count(counted, scene.word)}"
            return Verdict(_cause_of(counted), (counted.rank,), sentence)
    return None


def _histories(scene: Scene, group: str) -> dict[int, list[Call]]:
    return {
        rank.rank: [call for call in rank.calls if call.group == group and not call.is_message]
        for rank in scene.ranks
        if group in rank.seats
    }


def _deadlocked(scene: Scene, waits: Sequence[Wait]) -> Verdict | None:
    """Finds calls of different groups, or messages, that wait for each other."""
    ring = circle(waits, _blocked(scene))
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
    return Verdict(Cause.DEADLOCK, tuple(blamed), sentence)


def _blocked(scene: Scene) -> dict[int, bool]:
    """Returns which ranks can do nothing until a call has ended; a rank whose place is not known is taken for one."""
    return {rank.rank: rank.place is None or rank.place.is_call for rank in scene.ranks}


def _missed(scene: Scene, waits: Sequence[Wait]) -> Verdict | None:
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
        return Verdict(found.cause, (number,), sentence, found.is_fault)
    strange = [wait for wait in waits if wait.strangers]
    if not strange:
        return None
    wait = max(strange, key=lambda each: len(each.waiters))
    who = named(wait.strangers, scene.word)
    sentence = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; {who} did not come and left nothing to read"
    return Verdict(Cause.UNKNOWN, wait.strangers, sentence, is_certain=False)


def _miscounted(scene: Scene, wait: Wait) -> Verdict | None:
    """Finds the step in which one rank made more or fewer calls than usual, if all calls look the same."""
    found = miscount(_histories(scene, wait.call.group))
    if found is None:
        return None
    sentence = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; {_count(found, scene.word)}"
    return Verdict(_cause_of(found), (found.rank,), sentence)


def _cause_of(found: Miscount) -> Cause:
    return Cause.SKIPPED if found.slip is Slip.SKIPPED else Cause.TWICE


def _count(found: Miscount, word: str) -> str:
    more = "fewer" if found.made < found.usual else "more"
    by = abs(found.made - found.usual)
    return (
        f"{named([found.rank], word)} made {by} {'call' if by == 1 else 'calls'} {more} than the others in step "
        f"{found.step} ({found.made} instead of {found.usual})"
    )


def _left(scene: Scene, wait: Wait, rank: Rank) -> Verdict:
    """Words that a script has ended while others wait: it made fewer calls, or a single waiter made more."""
    start = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}; "
    gone = named(wait.absent, scene.word)
    if len(wait.absent) > len(wait.waiters):
        sentence = f"{start}{gone} {verb(len(wait.absent), 'have')} come to the end of the script without it"
        return Verdict(Cause.TWICE, wait.waiters, sentence)
    tie = len(wait.absent) == len(wait.waiters)
    sentence = f"{start}{absence(scene, rank, explain(rank).doing)}: it made fewer calls"
    return Verdict(Cause.SKIPPED, tuple(sorted({*wait.waiters, *wait.absent})) if tie else wait.absent, sentence)


def _unfinished(scene: Scene, waits: Sequence[Wait]) -> Verdict | None:
    """Blames a rank that is stopped in a call to which all have come; otherwise says that the call does not end."""
    complete = [wait for wait in waits if wait.is_complete and not wait.call.is_message]
    if not complete:
        return None
    wait = min(complete, key=lambda each: each.last_s)
    by_rank: Mapping[int, Rank] = {rank.rank: rank for rank in scene.ranks}
    start = f"{beginning(scene, wait.waiters)}{waiting(scene, wait)}"
    for number in wait.waiters:
        process = by_rank[number].process
        if process is not None and process.state in STILL:
            found = explain(by_rank[number])
            return Verdict(found.cause, (number,), f"{start}; {named([number], scene.word)} {found.doing}")
    took_s = scene.now_s - wait.last_s
    if 0 <= took_s < _SETTLED_S:
        return None
    duration = lasting(took_s)
    ranks = [by_rank[number] for number in wait.waiters]
    sentence = f"{start}; all {wait.members} have come, and it has not ended for {duration}: {_where_to_look(ranks)}"
    return Verdict(Cause.NO_PROGRESS, (), sentence)


def _where_to_look(ranks: Sequence[Rank]) -> str:
    """Returns what to look at while a call to which all of these have come does not end."""
    hosts = {rank.rank: rank.host for rank in ranks}
    names = sorted(set(hosts.values()))
    if len(names) < 2:
        return "look where they wait"
    silent = [each for each in silent_ways(ranks) if each[1] in hosts]
    if silent:
        rank, peer, silent_s = silent[0]
        return (
            f"{hosts[peer]} (rank {peer}) has not answered {hosts[rank]} (rank {rank}) for {lasting(silent_s)}, so "
            "look at the network between them"
        )
    way = slow_way(ranks)
    return f"look at the network between {', '.join(names[:4])}{'' if way is None else f'; {way.sentence}'}"
