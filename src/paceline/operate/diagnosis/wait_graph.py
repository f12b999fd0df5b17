"""Wait graph of a job: unfinished calls, the ranks that they wait for, and cycles (deadlocks)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.operate.diagnosis.job_snapshot import ExitReason, GroupMembership, JobSnapshot, RankCall, RankState


@dataclass(frozen=True)
class CallWait:
    """A call that has not ended, either because members of the group are absent or for another reason.

    Attributes:
        call: the call, as made by the first of the waiters.
        waiters: the ranks that are in the call, in ascending order.
        absent: the ranks that have not arrived.
        strangers: the group ranks of absent members whose state is unknown.
        since_s: the time at which the first waiter arrived.
        last_s: the time at which the last rank arrived or, for a call on a device, the time at which the last device
            reached the call.
        members: the size of the group.
        unreached: the waiters whose devices have not reached the call, because earlier work is incomplete.
    """

    call: RankCall
    waiters: tuple[int, ...]
    absent: tuple[int, ...]
    strangers: tuple[int, ...]
    since_s: float
    last_s: float
    members: int
    unreached: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all members have arrived."""
        return not self.absent and not self.strangers

    @property
    def is_formation(self) -> bool:
        """Whether the ranks are waiting for their group to form."""
        return self.call.is_formation


def waits_of(snapshot: JobSnapshot) -> list[CallWait]:
    """Returns the first open call of each group, and the first open message of each rank."""
    found = []
    for group in sorted({call.group for rank in snapshot.ranks for call in rank.calls if call.is_open}):
        members = _members_of(snapshot, group)
        waiting = [
            call
            for rank in members.values()
            for call in _collectives(rank, group)
            if call.is_open and not has_abandoned(rank, call)
        ]
        if waiting:
            found.append(_wait(group, min(call.sequence for call in waiting), members))
        for rank in members.values():
            found += _messages(rank, group, members)
    return found


def _members_of(snapshot: JobSnapshot, group: str) -> dict[int, RankState]:
    """Returns a group's known members, keyed by group rank, including members that have not joined the group yet."""
    members = {rank.memberships[group].number: rank for rank in snapshot.ranks if group in rank.memberships}
    by_rank = snapshot.by_rank
    awaited = {
        number: by_rank[rank]
        for member in members.values()
        for number, rank in enumerate(_ranks_of(member.memberships[group]))
        if rank in by_rank and snapshot.word == "rank"  # in an elastic job, slots are numbered differently from ranks
    }
    return {**awaited, **members}


def _ranks_of(membership: GroupMembership) -> Sequence[int]:
    """Returns the members' ranks in the job, or an empty sequence if they are unknown."""
    return range(membership.size) if membership.has_job_ranks else membership.ranks


def _collectives(rank: RankState, group: str) -> list[RankCall]:
    return [call for call in rank.calls if call.group == group and not call.is_message]


def _messages(rank: RankState, group: str, members: Mapping[int, RankState]) -> list[CallWait]:
    """Returns a rank's first open message whose peer has not begun the matching call."""
    for call in rank.calls:
        if call.group == group and call.is_message and call.is_open:
            peer, mine = members.get(call.header.peer), rank.memberships[group]
            ends = [] if peer is None else [other for other in peer.calls if other.group == group and other.is_open]
            is_matched = any(
                (end.header.peer, end.header.tag) == (mine.number, call.header.tag)
                and end.header.operation != call.header.operation
                for end in ends
            )
            if not is_matched:
                absent = () if peer is None else (peer.rank,)
                strangers = (call.header.peer,) if peer is None else ()
                return [CallWait(call, (rank.rank,), absent, strangers, call.arrived_s, call.arrived_s, mine.size)]
    return []


def _wait(group: str, number: int, members: Mapping[int, RankState]) -> CallWait:
    arrived = {member: call for member, rank in members.items() if (call := _made(rank, group, number)) is not None}
    waiting = {member: call for member, call in arrived.items() if call.is_open}
    size = max(rank.memberships[group].size for rank in members.values() if group in rank.memberships)
    reported = {member for call in arrived.values() for member in call.missing}

    def is_missed(member: int) -> bool:
        return not reported or member in reported

    behind = [member for member in set(members) - set(arrived) if _latest_completed(members[member], group) < number]
    absent = [member for member in behind if members[member].calls or is_missed(member)]
    strangers = [member for member in set(range(size)) - set(members) if is_missed(member)]
    first = min(waiting.values(), key=lambda call: call.arrived_s)
    return CallWait(
        call=first,
        waiters=tuple(sorted(members[member].rank for member in waiting)),
        absent=tuple(sorted(members[member].rank for member in absent)),
        strangers=tuple(sorted(strangers)),
        since_s=first.arrived_s,
        last_s=max(call.ready_s for call in arrived.values()),
        members=size,
        unreached=tuple(
            sorted(members[member].rank for member, call in waiting.items() if call.device and call.reached_s is None)
        ),
    )


def _latest_completed(rank: RankState, group: str) -> int:
    """Returns the number of the latest call that a rank has made, excluding abandoned calls."""
    made = [call.sequence for call in _collectives(rank, group) if not has_abandoned(rank, call)]
    return max(made, default=-1)


def has_abandoned(rank: RankState, call: RankCall) -> bool:
    """Returns True if a rank exited without an error before `call`, an asynchronous call, had completed."""
    return call.ended_s is None and rank.manner is ExitReason.FINISHED


def _made(rank: RankState, group: str, number: int) -> RankCall | None:
    # In an elastic job, the groups of successive views share a name, and the call numbers restart in each group.
    calls = _collectives(rank, group)
    made = [call for call in calls if call.sequence == number and not has_abandoned(rank, call)]
    return max(made, key=lambda call: (call.is_open, call.arrived_s), default=None)


def find_deadlock(waits: Sequence[CallWait], is_blocked: Mapping[int, bool]) -> list[CallWait]:
    """Returns a list of calls in different groups that wait for each other; empty without a deadlock.

    Args:
        waits: the unfinished calls.
        is_blocked: whether each rank is blocked until its current call ends.
    """
    edges = {
        index: [
            other
            for other, later in enumerate(waits)
            if other != index and any(is_blocked.get(rank, True) for rank in set(wait.absent) & set(later.waiters))
        ]
        for index, wait in enumerate(waits)
    }
    for start in edges:
        if cycle := _shortest_cycle(start, edges):
            return [waits[index] for index in cycle]
    return []


def _shortest_cycle(start: int, edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns the nodes of the shortest cycle through `start`; empty without a cycle."""
    paths = [[start, node] for node in edges[start]]
    seen = set()
    while paths:
        path = paths.pop(0)
        if path[-1] == start:
            return path[:-1]
        if path[-1] not in seen:
            seen.add(path[-1])
            paths += [[*path, node] for node in edges[path[-1]]]
    return []


def roots(waits: Sequence[CallWait], is_blocked: Mapping[int, bool]) -> list[int]:
    """Returns absent ranks that are not waiting themselves, in descending order of the number of missed calls."""
    missed = Counter(rank for wait in waits for rank in wait.absent)
    held = {rank for wait in waits if not wait.is_complete for rank in wait.waiters if is_blocked.get(rank, True)}
    return [rank for rank in sorted(missed, key=lambda rank: (-missed[rank], rank)) if rank not in held]
