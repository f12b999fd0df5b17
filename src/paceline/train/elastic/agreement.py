"""The agreement among a new view's members, computed from their statuses; every member computes the same result.

A *round* is one sum over all shards: the gradient of a step, or an evaluation. A member keeps the partial sums that it
has computed in the current round, so that only the partial sums of a dead worker are computed again. A member commits a
round only after it has received the vote of every member, so every member then has the result. Members that have not
committed the round lack only the confirmation that all members agreed. They are one round behind, and commit the result
for which they voted.

After one member has begun a batch, another member may lose its connections and begin the same batch in a later view.
This second member must not assign the batch again. Members therefore exchange the latest batch that they have begun or
received, and adopt its assignment (`BatchAssignments`).

Each member's number of shards is proportional to its speed, and changes only if the gain is large enough
(`fair_counts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median_low

import msgspec

from paceline.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError, RendezvousError, StoreError
from paceline.train.logical_shards.tree_sum import Node, is_tree_over_ranks, nodes_within, run_of_rank


class BatchAssignment(msgspec.Struct, frozen=True, array_like=True):
    """The members that share a batch, by rank. The batch is identified by its first round."""

    round: int
    members: tuple[str, ...]


NO_BATCH_ASSIGNMENT = BatchAssignment(-1, ())


@dataclass(frozen=True)
class ViewChange:
    """A change in the view's members before a batch.

    Attributes:
        workers: The number of workers, starting with this batch.
        came: The names of the workers that have joined since the previous batch.
        went: The names of the workers that have left since the previous batch.
    """

    workers: int
    came: tuple[str, ...]
    went: tuple[str, ...]


class BatchAssignments:
    """The batch assignments that one member has received or created."""

    def __init__(self) -> None:
        self.latest = NO_BATCH_ASSIGNMENT
        self._reported: tuple[str, ...] = ()  # the members of the latest batch that this member has begun

    def merge(self, others: Iterable[BatchAssignment], *, is_new: bool) -> None:
        """Merges the latest assignments of the view's members.

        A new member is treated as if it had been present for the latest batch: its next `begin` reports only later
        changes.
        """
        self.latest = max([self.latest, *others], key=lambda dealt: dealt.round)
        if is_new:
            self._reported = self.latest.members

    def begin(self, round_number: int, members: tuple[str, ...]) -> ViewChange | None:
        """Begins a batch and assigns it to `members`, unless it is already assigned; returns the change in members.

        >>> early, late = BatchAssignments(), BatchAssignments()
        >>> early.begin(0, ("a", "b", "c"))
        ViewChange(workers=3, came=('a', 'b', 'c'), went=())
        >>> late.merge([early.latest], is_new=False)
        >>> late.begin(0, ("a", "b")) == ViewChange(3, ("a", "b", "c"), ())
        True
        """
        if self.latest.round < round_number:
            self.latest = BatchAssignment(round_number, members)
        before, now = self._reported, self.latest.members
        self._reported = now
        if before == now:
            return None
        came = tuple(name for name in now if name not in before)
        return ViewChange(len(now), came, tuple(name for name in before if name not in now))


REBALANCE_EVERY = 25  # rounds between two comparisons of the members' speeds
_WORTH = 0.9  # a new division must reduce the time of the slowest rank to less than this fraction
_WORTH_SLICES = 0.75  # used instead of `_WORTH` if the core could no longer add up the ranks' sums
_NEW = 0.2  # the weight of the latest measurement in a member's speed


def even_counts(shards: int, ranks: int) -> list[int]:
    """Returns the number of shards per rank for equally fast ranks.

    The first ranks receive the remainder. The last ranks receive it instead if the core could not otherwise add up the
    ranks' sums (see `sum_over_ranks`), for example if a few ranks were lost in a job with as many ranks as shards.

    >>> even_counts(8, 3), even_counts(4, 3)
    ([3, 3, 2], [1, 1, 2])
    """
    base, more = divmod(shards, ranks)
    first, last = ([base + (rank in larger) for rank in range(ranks)] for larger in (range(more), range(ranks)[-more:]))
    return last if more and _adds_up_in_core(last) and not _adds_up_in_core(first) else first


def fair_counts(shards: int, shard_ns: Sequence[int], now: Sequence[int]) -> list[int]:
    """Returns the number of shards per rank, or the current numbers `now` if a change is not worthwhile.

    Minimizes the time of the slowest rank, and gives every rank a shard if there are enough shards. `shard_ns` is the
    time per shard on each rank, or 0 if unknown.

    >>> fair_counts(12, [10, 10, 20, 20], [3, 3, 3, 3])
    [4, 4, 2, 2]
    >>> fair_counts(12, [10, 10, 11, 11], [3, 3, 3, 3])
    [3, 3, 3, 3]
    >>> fair_counts(4, [5, 6, 6], [1, 1, 2])
    [1, 1, 2]
    """
    known = [time_ns for time_ns in shard_ns if time_ns > 0]
    if not known:
        return list(now)
    costs = [time_ns if time_ns > 0 else median_low(known) for time_ns in shard_ns]
    counts = [0] * len(costs)
    for shard in range(shards):
        idle = [rank for rank, count in enumerate(counts) if count == 0]
        candidates = idle if shard < len(costs) else range(len(costs))
        chosen = min(candidates, key=lambda rank: ((counts[rank] + 1) * costs[rank], rank))
        counts[chosen] += 1
    longest = max(count * cost for count, cost in zip(counts, costs, strict=True))
    longest_now = max(count * cost for count, cost in zip(now, costs, strict=True))
    loses_core = _adds_up_in_core(now) and not _adds_up_in_core(counts)
    return counts if longest < (_WORTH_SLICES if loses_core else _WORTH) * longest_now else list(now)


def _adds_up_in_core(counts: Sequence[int]) -> bool:
    """Returns True if a tree over ranks with these shard counts computes the same sum as the tree over shards."""
    return is_tree_over_ranks(Node(0, sum(counts)), deal_runs(counts))


def smoothed(before_ns: int, measured_ns: int) -> int:
    """Returns the smoothed time per shard after a new measurement."""
    return measured_ns if before_ns == 0 else round((1 - _NEW) * before_ns + _NEW * measured_ns)


FRESH = -1  # the round of a worker that has no state yet
WINDOWS = 16  # number of parts of the state, one of which is compared in each round
# Errors that a member raises when another member is lost or has left for a later view.
LOST_MEMBER_ERRORS = (PeerLostError, GroupAbortedError, CollectiveTimeoutError, RendezvousError, StoreError)

Deal = list[list[Node]]  # for each rank, the tree nodes whose sums it computes


class MemberStatus(msgspec.Struct, frozen=True, array_like=True):
    """The status that a member sends when it enters a view.

    A member is a *guest* until its state has been fully compared with the states of the other members. A guest's vote
    does not count.
    """

    round: int  # the member's next round, or FRESH
    held: tuple[tuple[int, int], ...] = ()  # the tree nodes whose sums the member holds for round `round`
    shard_ns: int = 0  # the member's time per shard, or 0 before it has computed any shard
    dealt: BatchAssignment = NO_BATCH_ASSIGNMENT  # the latest one that the member has received or created
    has_begun: bool = False  # whether the member has begun the batch that contains round `round`
    voted: int = 0  # the digest of the result for which the member voted in round `round`, or 0
    committed: int = 0  # the digest of the previous round's result, or 0
    has_followed: bool = False  # whether it has repeated the others' optimizer steps and lacks only the remaining state
    parts: tuple[tuple[int, int], ...] = ()  # the index and digest of each part that the catch-up did not compare
    is_sender: bool = False  # whether the member is the sender of a transfer
    guest_until: int = 0  # the round before which the member is a guest


@dataclass(frozen=True)
class Agreement:
    """The decisions that follow from the members' statuses."""

    round: int  # the round that is computed next
    deal: Deal  # in round `round`
    source: tuple[int | None, ...]  # for each rank, the rank that sends it the state or a part of it, if it lacks any
    late: frozenset[int] = frozenset()  # ranks with the latest result, but without confirmation of its commit
    outvoted: frozenset[int] = frozenset()  # the late ranks that voted for a different result
    committed: int = 0  # the digest of the latest result
    followers: frozenset[int] = frozenset()  # the ranks that lack only a part of the state
    guest_until: tuple[int, ...] = ()  # for each rank, the round before which it is a guest

    def guests(self, round_number: int) -> frozenset[int]:
        """Returns the ranks that are guests in a round."""
        return frozenset(rank for rank, until in enumerate(self.guest_until) if round_number < until)


NOTHING_AGREED = Agreement(0, [], ())


def agree(statuses: Sequence[MemberStatus], shards: int) -> Agreement:
    """Returns the members' next actions, given their statuses by rank.

    Raises ValueError if a member is more than one round behind, which the protocol rules out.
    """
    rounds = [FRESH if status.has_followed else status.round for status in statuses]
    latest = max(rounds)
    if latest == FRESH:  # the job begins, and all ranks receive the state from rank 0
        return Agreement(0, deal_evenly(shards, len(statuses)), (None, *[0] * (len(statuses) - 1)))
    if lost := [rank for rank, round_ in enumerate(rounds) if FRESH < round_ < latest - 1]:
        raise ValueError(f"ranks {lost} are more than one round behind round {latest}: {list(statuses)}")
    senders = [rank for rank, round_ in enumerate(rounds) if round_ == latest]
    late = frozenset(rank for rank, round_ in enumerate(rounds) if FRESH < round_ < latest)
    committed = statuses[senders[0]].committed
    outvoted = frozenset(rank for rank in late if statuses[rank].voted != committed)
    held = [status.held if number == latest else () for status, number in zip(statuses, rounds, strict=True)]
    deal = complete([[Node(*node) for node in nodes] for nodes in held], shards)
    lacking = [rank for rank, round_ in enumerate(rounds) if round_ == FRESH]
    followers = frozenset(
        rank
        for rank in lacking
        if statuses[rank].has_followed and (statuses[rank].round, statuses[rank].committed) == (latest, committed)
    )
    transfer_senders = [rank for rank in senders if statuses[rank].is_sender] or senders
    source: list[int | None] = [None] * len(statuses)
    guest_until = [status.guest_until for status in statuses]
    for index, rank in enumerate(lacking):
        able = transfer_senders if rank in followers else senders
        source[rank] = able[index % len(able)]
        guest_until[rank] = latest + WINDOWS if rank in followers else 0
    return Agreement(latest, deal, tuple(source), late, outvoted, committed, followers, tuple(guest_until))


def deal_runs(counts: Sequence[int]) -> Deal:
    """Returns a division of the shards in which rank r has `counts[r]` consecutive shards.

    >>> deal_runs([2, 1, 1])[1:]
    [[Node(first=2, stop=3)], [Node(first=3, stop=4)]]
    """
    stops = [*accumulate(counts)]
    return [
        nodes_within(range(stop - count, stop), Node(0, sum(counts))) for stop, count in zip(stops, counts, strict=True)
    ]


def deal_evenly(shards: int, ranks: int) -> Deal:
    """Returns a division in which each rank has consecutive shards. The ranks' counts differ by at most one."""
    return deal_runs(even_counts(shards, ranks))


def complete(held: Sequence[Sequence[Node]], shards: int) -> Deal:
    """Returns a division in which each rank keeps the sums that it holds, and the missing shards are divided evenly.

    >>> complete([[Node(0, 2)], [Node(2, 4)]], 8)[1]
    [Node(first=2, stop=4), Node(first=6, stop=8)]
    """
    covered = [False] * shards
    kept: Deal = []
    for nodes in held:
        mine = []
        for node in nodes:
            if not any(covered[node.first : node.stop]):
                covered[node.first : node.stop] = [True] * (node.stop - node.first)
                mine.append(node)
        kept.append(mine)
    missing = [shard for shard in range(shards) if not covered[shard]]
    for rank, mine in enumerate(kept):
        share = run_of_rank(len(missing), len(kept), rank)
        for _, run in groupby(share, key=lambda index: missing[index] - index):  # runs of consecutive shards
            chosen = [missing[index] for index in run]
            mine += nodes_within(range(chosen[0], chosen[-1] + 1), Node(0, shards))
    return kept
