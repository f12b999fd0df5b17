"""What the members of a new view agree on, from what each of them says about itself; every member gets the same result.

A *round* is one sum over all shards: the gradient of a step, or an evaluation. A member keeps the partial sums that it
has computed for its round n, so only what a dead worker had computed is computed again. Whoever has committed round n
has seen the vote of every member, so every member has the result, and the rest only lack the knowledge that all agreed.
They are one round behind, and commit what they have voted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.elastic.dealings import NOTHING_DEALT, Dealt
from paceline.elastic.speeds import even_counts
from paceline.parallel.sharded.tree import Node, nodes_within, run_of_rank

FRESH = -1  # the round of a worker that has no state yet
WINDOWS = 16  # parts of the state, one of which the members compare in each round

Deal = list[list[Node]]  # for each rank the nodes of the tree whose sums it computes


class Status(msgspec.Struct, frozen=True, array_like=True):
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
        teaches: it gives a lesson.
        guest_until: before this round it has not yet shown in votes that its whole state is that of the others.
    """

    round: int
    held: tuple[tuple[int, int], ...] = ()
    shard_ns: int = 0
    dealt: Dealt = NOTHING_DEALT
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


def agree(statuses: Sequence[Status], shards: int) -> Agreement:
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
    donors = [rank for rank, each in enumerate(rounds) if each == latest]
    late = frozenset(rank for rank, each in enumerate(rounds) if FRESH < each < latest)
    committed = statuses[donors[0]].committed
    outvoted = frozenset(rank for rank in late if statuses[rank].voted != committed)
    held = [status.held if each == latest else () for status, each in zip(statuses, rounds, strict=True)]
    deal = complete([[Node(*each) for each in nodes] for nodes in held], shards)
    lacking = [rank for rank, each in enumerate(rounds) if each == FRESH]
    followers = frozenset(rank for rank in lacking if _is_up_to_date(statuses[rank], latest, committed))
    source = _sources(statuses, donors, lacking, followers)
    guest_until = [each.guest_until for each in statuses]
    for rank in lacking:
        guest_until[rank] = latest + WINDOWS if rank in followers else 0
    return Agreement(latest, deal, source, late, outvoted, committed, followers, tuple(guest_until))


def _is_up_to_date(status: Status, latest: int, committed: int) -> bool:
    return status.has_followed and status.round == latest and status.committed == committed


def _sources(
    statuses: Sequence[Status], donors: Sequence[int], lacking: Sequence[int], followers: frozenset[int]
) -> tuple[int | None, ...]:
    """Returns for each rank from which it gets what it lacks; those that teach know what followers have already."""
    teachers = [rank for rank in donors if statuses[rank].teaches] or donors
    chosen: dict[int, int] = {}
    for at, rank in enumerate(lacking):
        able = teachers if rank in followers else donors
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
