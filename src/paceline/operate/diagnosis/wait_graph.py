"""Who waits for whom: the calls that cannot end, the ranks that they wait for, and the circles among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.operate.diagnosis.job_snapshot import JobSnapshot, RankCall, RankState


@dataclass(frozen=True)
class CallWait:
    """A call that some members of a group have made and others have not, or that none of them can end.

    Attributes:
        call: as the first of `waiters` made it.
        waiters: the ranks that are in it, by number.
        absent: the ranks that have not come.
        strangers: the members that have not come and of which nothing is known, by their number in the group.
        since_s: when the first waiter came.
        last_s: when the last of those came that have come.
        members: how many ranks the group has.
    """

    call: RankCall
    waiters: tuple[int, ...]
    absent: tuple[int, ...]
    strangers: tuple[int, ...]
    since_s: float
    last_s: float
    members: int

    @property
    def is_complete(self) -> bool:
        """Whether everybody has come."""
        return not self.absent and not self.strangers


def waits_of(scene: JobSnapshot) -> list[CallWait]:
    """Returns the first open call of each group, with those who are in it and those who have not come."""
    found = []
    for group in sorted({call.group for rank in scene.ranks for call in rank.calls if call.is_open}):
        members = {rank.seats[group].number: rank for rank in scene.ranks if group in rank.seats}
        waiting = [call for rank in members.values() for call in _collectives(rank, group) if call.is_open]
        if waiting:
            found.append(_wait(group, min(call.sequence for call in waiting), members))
        for rank in members.values():
            found += _messages(rank, group, members)
    return found


def _collectives(rank: RankState, group: str) -> list[RankCall]:
    return [call for call in rank.calls if call.group == group and not call.is_message]


def _messages(rank: RankState, group: str, members: Mapping[int, RankState]) -> list[CallWait]:
    """Returns the first message that a rank waits for and whose other end the peer has not begun."""
    for call in rank.calls:
        if call.group == group and call.is_message and call.is_open:
            peer, mine = members.get(call.header.peer), rank.seats[group]
            ends = [] if peer is None else [each for each in peer.calls if each.group == group and each.is_open]
            is_met = any(
                each.header.peer == mine.number and each.header.operation != call.header.operation for each in ends
            )
            if not is_met:
                absent = () if peer is None else (peer.rank,)
                strangers = (call.header.peer,) if peer is None else ()
                return [CallWait(call, (rank.rank,), absent, strangers, call.arrived_s, call.arrived_s, mine.size)]
    return []


def _wait(group: str, number: int, members: Mapping[int, RankState]) -> CallWait:
    here = {seat: call for seat, rank in members.items() if (call := _made(rank, group, number)) is not None}
    waiting = {seat: call for seat, call in here.items() if call.is_open}
    size = max(rank.seats[group].size for rank in members.values())
    reported = {seat for call in here.values() for seat in call.missing}

    def is_missed(seat: int) -> bool:
        return not reported or seat in reported

    behind = [seat for seat in set(members) - set(here) if _latest(members[seat], group) < number]
    absent = [seat for seat in behind if members[seat].calls or is_missed(seat)]
    strangers = [seat for seat in set(range(size)) - set(members) if is_missed(seat)]
    first = min(waiting.values(), key=lambda call: call.arrived_s)
    return CallWait(
        call=first,
        waiters=tuple(sorted(members[seat].rank for seat in waiting)),
        absent=tuple(sorted(members[seat].rank for seat in absent)),
        strangers=tuple(sorted(strangers)),
        since_s=first.arrived_s,
        last_s=max(call.arrived_s for call in here.values()),
        members=size,
    )


def _latest(rank: RankState, group: str) -> int:
    return max((call.sequence for call in _collectives(rank, group)), default=-1)


def _made(rank: RankState, group: str, number: int) -> RankCall | None:
    # In an elastic job each view has a group of the same name, which counts from the beginning.
    made = [call for call in _collectives(rank, group) if call.sequence == number]
    return max(made, key=lambda call: (call.is_open, call.arrived_s), default=None)


def find_deadlock(waits: Sequence[CallWait], is_blocked: Mapping[int, bool]) -> list[CallWait]:
    """Returns calls of different groups that wait for each other; empty if there are none.

    Args:
        waits: the calls.
        is_blocked: whether a rank can do nothing until a call that it is in has ended.
    """
    follows = {
        at: [
            other
            for other, later in enumerate(waits)
            if other != at and any(is_blocked.get(rank, True) for rank in set(wait.absent) & set(later.waiters))
        ]
        for at, wait in enumerate(waits)
    }
    for start in follows:
        path = _path_back(start, follows)
        if path:
            return [waits[at] for at in path]
    return []


def _path_back(start: int, follows: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the shortest way from `start` back to it."""
    paths = [[start, at] for at in follows[start]]
    seen = set()
    while paths:
        path = paths.pop(0)
        if path[-1] == start:
            return path[:-1]
        if path[-1] not in seen:
            seen.add(path[-1])
            paths += [[*path, at] for at in follows[path[-1]]]
    return []


def roots(waits: Sequence[CallWait], is_blocked: Mapping[int, bool]) -> list[int]:
    """Returns the ranks for which others wait and that are in no such call themselves; those missed most come first."""
    missed = Counter(rank for wait in waits for rank in wait.absent)
    held = {rank for wait in waits if not wait.is_complete for rank in wait.waiters if is_blocked.get(rank, True)}
    return [rank for rank, _ in sorted(missed.items(), key=lambda each: (-each[1], each[0])) if rank not in held]
