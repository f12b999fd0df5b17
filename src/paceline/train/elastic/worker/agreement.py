"""What the members of a new view agree on, from what each of them says about itself; every member gets the same result.

A *round* is one sum over all shards: the gradient of a step, or an evaluation. A member keeps the partial sums that it
has computed for its round n, so only what a dead worker had computed is computed again. Whoever has committed round n
has seen the vote of every member, so every member has the result, and the rest only lack the knowledge that all agreed.
They are one round behind, and commit what they have voted for.

To whom each batch was dealt out, on which the members agree even if they are in different views when it begins.

A member may begin a batch, and another one of the same view may lose its connections before it does. The latter then
begins the batch in a later view, and must not deal it out anew. So members tell each other, when they enter a view,
of the latest batch that they know to have begun, and whoever has not begun it yet takes over how it was dealt out.

How many shards each member gets: in proportion to its speed, and changed only where that pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low

import msgspec

from paceline.train.logical_shards.tree_sum import Node, is_tree_over_ranks, nodes_within, run_of_rank


class BatchAssignment(msgspec.Struct, frozen=True, array_like=True):
    """A batch that was dealt out: the round that it begins with, and the members that have shares in it, by rank."""

    round: int
    members: tuple[str, ...]


NO_BATCH_ASSIGNMENT = BatchAssignment(-1, ())


@dataclass(frozen=True)
class ViewChange:
    """Who trains from this batch on.

    Attributes:
        workers: the number of workers.
        came: the names of those that were not there in the batch before.
        went: the names of those that are not there any more.
    """

    workers: int
    came: tuple[str, ...]
    went: tuple[str, ...]


class BatchAssignments:
    """What one member knows of the batches that were dealt out."""

    def __init__(self) -> None:
        self.latest = NO_BATCH_ASSIGNMENT
        self._told: tuple[str, ...] = ()  # the members at the latest batch that this member has begun itself

    def learn(self, others: Iterable[BatchAssignment], *, is_new: bool) -> None:
        """Takes what the members of a view know; a new member has taken part in all that was dealt out before."""
        self.latest = max([self.latest, *others], key=lambda dealt: dealt.round)
        if is_new:
            self._told = self.latest.members

    def begin(self, round_number: int, members: tuple[str, ...]) -> ViewChange | None:
        """Begins a batch, and deals it out to `members` unless that was done; returns the change since the last one.

        >>> early, late = BatchAssignments(), BatchAssignments()
        >>> early.begin(0, ("a", "b", "c"))
        ViewChange(workers=3, came=('a', 'b', 'c'), went=())
        >>> late.learn([early.latest], is_new=False)
        >>> late.begin(0, ("a", "b")) == ViewChange(3, ("a", "b", "c"), ())
        True
        """
        if self.latest.round < round_number:
            self.latest = BatchAssignment(round_number, members)
        before, now = self._told, self.latest.members
        self._told = now
        if before == now:
            return None
        came = tuple(name for name in now if name not in before)
        return ViewChange(len(now), came, tuple(name for name in before if name not in now))


REBALANCE_EVERY = 25  # rounds between two looks at the members' speeds
_WORTH = 0.9  # a new deal must make the longest share shorter than this part of what it is
_WORTH_SLICES = 0.75  # ... if the core adds up the sums now, and could not any more
_NEW = 0.2  # the weight of the latest measurement in a member's speed


def even_counts(shards: int, ranks: int) -> list[int]:
    """Returns how many shards each rank gets if all are equally fast.

    Those that are left over go to the first ranks, or to the last ones if only then the core can add up what the ranks
    have (see `sum_over_ranks`). That is so where few of as many ranks as shards are lost.

    >>> even_counts(8, 3), even_counts(4, 3)
    ([3, 3, 2], [1, 1, 2])
    """
    each, more = divmod(shards, ranks)
    first, last = ([each + (rank in larger) for rank in range(ranks)] for larger in (range(more), range(ranks)[-more:]))
    return last if more and _adds_up_in_core(last) and not _adds_up_in_core(first) else first


def fair_counts(shards: int, shard_ns: Sequence[int], now: Sequence[int]) -> list[int]:
    """Returns how many shards each rank gets; `now` if nothing else is worth the change.

    The longest share is as short as it can be, and every rank has a shard if there are enough.

    Args:
        shards: the number of shards.
        shard_ns: how long a shard takes on each rank, in nanoseconds; 0 for a rank of which that is not known yet.
        now: the number of shards of each rank until now.

    >>> fair_counts(12, [10, 10, 20, 20], [3, 3, 3, 3])
    [4, 4, 2, 2]
    >>> fair_counts(12, [10, 10, 11, 11], [3, 3, 3, 3])
    [3, 3, 3, 3]
    >>> fair_counts(4, [5, 6, 6], [1, 1, 2])
    [1, 1, 2]
    """
    known = [each for each in shard_ns if each > 0]
    if not known:
        return list(now)
    costs = [each if each > 0 else median_low(known) for each in shard_ns]
    counts = [0] * len(costs)
    for at in range(shards):
        idle = [rank for rank, count in enumerate(counts) if count == 0]
        candidates = idle if at < len(costs) else range(len(costs))
        chosen = min(candidates, key=lambda rank: ((counts[rank] + 1) * costs[rank], rank))
        counts[chosen] += 1
    longest = max(count * cost for count, cost in zip(counts, costs, strict=True))
    longest_now = max(count * cost for count, cost in zip(now, costs, strict=True))
    loses_core = _adds_up_in_core(now) and not _adds_up_in_core(counts)
    return counts if longest < (_WORTH_SLICES if loses_core else _WORTH) * longest_now else list(now)


def _adds_up_in_core(counts: Sequence[int]) -> bool:
    """Returns whether the sum over all shards is the tree over ranks with so many shards each."""
    root, stops = Node(0, sum(counts)), [*accumulate(counts)]
    runs = [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
    return is_tree_over_ranks(root, [nodes_within(run, root) for run in runs])


def smoothed(before_ns: int, measured_ns: int) -> int:
    """Returns a member's speed after a measurement, which changes it slowly."""
    return measured_ns if before_ns == 0 else round((1 - _NEW) * before_ns + _NEW * measured_ns)


FRESH = -1  # the round of a worker that has no state yet
WINDOWS = 16  # parts of the state, one of which the members compare in each round

Deal = list[list[Node]]  # for each rank the nodes of the tree whose sums it computes


class MemberStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a member says about itself when it enters a view.

    Attributes:
        round: its round.
        held: the nodes of that round that it has the sums of.
        shard_ns: how long a shard takes on it, 0 if it has not computed any.
        dealt: the latest batch that it knows to have been dealt out.
        has_begun: it is in the batch whose first round that is, or in a later round of it.
        voted: the digest of the result with which it has voted in this round, 0 without one.
        committed: the digest of the result of the round before, 0 without one.
        has_followed: it has made the steps of the others, in the usual loop, and lacks the rest of the state.
        parts: the parts of the state that were not compared meanwhile, each with its digest.
        teaches: it gives a transfer.
        guest_until: before this round it has not yet shown in votes that its whole state is that of the others.
    """

    round: int
    held: tuple[tuple[int, int], ...] = ()
    shard_ns: int = 0
    dealt: BatchAssignment = NO_BATCH_ASSIGNMENT
    has_begun: bool = False
    voted: int = 0
    committed: int = 0
    has_followed: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    teaches: bool = False
    guest_until: int = 0


@dataclass(frozen=True)
class Agreement:
    """What follows from the members' statuses.

    Attributes:
        round: the round that is computed next.
        deal: the nodes of each rank in that round.
        source: for each rank that lacks the state, or a part of it, the rank from which it gets that; None for the
            others.
        followers: those ranks that lack only a part.
        guest_until: for each rank the round before which it does not count where states differ.
        late: the ranks that have the latest result, but do not know that it was committed.
        outvoted: the late ranks that have voted for another result.
        committed: the digest of the latest result.
    """

    round: int
    deal: Deal
    source: tuple[int | None, ...]
    late: frozenset[int] = frozenset()
    outvoted: frozenset[int] = frozenset()
    committed: int = 0
    followers: frozenset[int] = frozenset()
    guest_until: tuple[int, ...] = ()

    def guests(self, round_number: int) -> frozenset[int]:
        """Returns the ranks that are guests in a round."""
        return frozenset(rank for rank, until in enumerate(self.guest_until) if round_number < until)


NOTHING_AGREED = Agreement(0, [], ())


def agree(statuses: Sequence[MemberStatus], shards: int) -> Agreement:
    """Returns what the members do next, given their statuses by rank.

    Raises:
        ValueError: a member is more than one round behind, which the protocol rules out.
    """
    rounds = [FRESH if status.has_followed else status.round for status in statuses]
    latest = max(rounds)
    if latest == FRESH:  # the job begins, and rank 0's state is everybody's
        return Agreement(0, deal_evenly(shards, len(statuses)), (None, *[0] * (len(statuses) - 1)))
    if lost := [rank for rank, each in enumerate(rounds) if FRESH < each < latest - 1]:
        raise ValueError(f"ranks {lost} are more than one round behind round {latest}: {list(statuses)}")
    senders = [rank for rank, each in enumerate(rounds) if each == latest]
    late = frozenset(rank for rank, each in enumerate(rounds) if FRESH < each < latest)
    committed = statuses[senders[0]].committed
    outvoted = frozenset(rank for rank in late if statuses[rank].voted != committed)
    held = [status.held if each == latest else () for status, each in zip(statuses, rounds, strict=True)]
    deal = complete([[Node(*each) for each in nodes] for nodes in held], shards)
    lacking = [rank for rank, each in enumerate(rounds) if each == FRESH]
    followers = frozenset(rank for rank in lacking if _is_up_to_date(statuses[rank], latest, committed))
    source = _sources(statuses, senders, lacking, followers)
    guest_until = [each.guest_until for each in statuses]
    for rank in lacking:
        guest_until[rank] = latest + WINDOWS if rank in followers else 0
    return Agreement(latest, deal, source, late, outvoted, committed, followers, tuple(guest_until))


def _is_up_to_date(status: MemberStatus, latest: int, committed: int) -> bool:
    return status.has_followed and status.round == latest and status.committed == committed


def _sources(
    statuses: Sequence[MemberStatus], senders: Sequence[int], lacking: Sequence[int], followers: frozenset[int]
) -> tuple[int | None, ...]:
    """Returns for each rank from which it gets what it lacks; those that teach know what followers have already."""
    teachers = [rank for rank in senders if statuses[rank].teaches] or senders
    chosen: dict[int, int] = {}
    for at, rank in enumerate(lacking):
        able = teachers if rank in followers else senders
        chosen[rank] = able[at % len(able)]
    return tuple(chosen.get(rank) for rank in range(len(statuses)))


def deal_runs(counts: Sequence[int]) -> Deal:
    """Returns a deal in which rank r has a run of `counts[r]` consecutive shards.

    >>> deal_runs([2, 1, 1])[1:]
    [[Node(first=2, stop=3)], [Node(first=3, stop=4)]]
    """
    root = Node(0, sum(counts))
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [nodes_within(range(at, at + count), root) for at, count in zip(starts, counts, strict=True)]


def deal_evenly(shards: int, ranks: int) -> Deal:
    """Returns a deal in which each rank has a run of consecutive shards, of lengths that differ by one at most."""
    return deal_runs(even_counts(shards, ranks))


def complete(held: Sequence[Sequence[Node]], shards: int) -> Deal:
    """Returns a deal in which each rank keeps the sums that it holds, and the missing shards are dealt out evenly.

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
        mine += _nodes_of([missing[at] for at in share], shards)
    return kept


def _nodes_of(chosen: Sequence[int], shards: int) -> list[Node]:
    """Returns the largest nodes of the tree that together hold the chosen shards, which are in ascending order."""
    nodes: list[Node] = []
    first = 0
    for at in range(1, len(chosen) + 1):
        if at == len(chosen) or chosen[at] != chosen[at - 1] + 1:
            nodes += nodes_within(range(chosen[first], chosen[at - 1] + 1), Node(0, shards))
            first = at
    return nodes
