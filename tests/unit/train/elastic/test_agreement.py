"""Agreement of members: each shard is assigned once, computed shards keep their owner, and the newest round wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.elastic.agreement import (
    FRESH,
    WINDOWS,
    MemberStatus,
    agree,
    complete,
    deal_evenly,
    deal_runs,
    even_counts,
    fair_counts,
)
from paceline.train.logical_shards.tree_sum import Node, add_up, is_tree_over_ranks

SHARDS = 12


def shards_of(deal: list[list[Node]]) -> list[int]:
    return sorted(shard for nodes in deal for node in nodes for shard in range(node.first, node.stop))


def sum_is_found(deal: list[list[Node]], shards: int) -> bool:
    """Returns True if the sum over all shards can be computed in tree order from the sums of the assigned nodes."""
    known = {node: list(range(node.first, node.stop)) for nodes in deal for node in nodes}

    def unknown(shard: int) -> list[int]:
        raise AssertionError(f"nobody has shard {shard}")

    return add_up(Node(0, shards), lambda left, right: left + right, unknown, known) == list(range(shards))


@given(st.integers(1, 9), st.sets(st.integers(0, 8)), st.integers(1, 40))
def test_survivors_keep_what_they_hold(ranks, lost, shards):
    deal = deal_evenly(shards, ranks)
    survivors = [nodes for rank, nodes in enumerate(deal) if rank not in lost] or [[]]
    after = complete(survivors, shards)
    assert shards_of(after) == list(range(shards))
    assert all(mine[: len(held)] == held for held, mine in zip(survivors, after, strict=True))
    assert sum_is_found(after, shards)
    # Lost shards are reassigned evenly.
    added = [sum(n.stop - n.first for n in mine[len(held) :]) for held, mine in zip(survivors, after, strict=True)]
    assert max(added) - min(added) <= 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_runs_hold_every_shard_once(counts):
    deal = deal_runs(counts)
    assert [sum(node.stop - node.first for node in nodes) for nodes in deal] == counts
    assert sum_is_found(deal, sum(counts))


def test_sums_that_two_members_hold_count_once():
    deal = complete([[Node(0, 4)], [Node(2, 4), Node(4, 6)]], 8)
    assert deal == [[Node(0, 4), Node(6, 7)], [Node(4, 6), Node(7, 8)]]


def test_at_the_beginning_rank_0_gives_the_state():
    agreed = agree([MemberStatus(FRESH)] * 3, SHARDS)
    assert (agreed.round, agreed.source, agreed.late) == (0, (None, 0, 0), frozenset())


def test_members_that_are_behind_take_what_they_voted_for():
    agreed = agree(
        [MemberStatus(6, voted=5), MemberStatus(7, ((0, 4),), committed=5), MemberStatus(FRESH), MemberStatus(7)],
        SHARDS,
    )
    assert agreed.round == 7
    assert (agreed.late, agreed.outvoted, agreed.committed) == ({0}, frozenset(), 5)
    assert agreed.source == (None, None, 1, None)
    assert Node(0, 4) in agreed.deal[1]
    assert shards_of(agreed.deal) == list(range(SHARDS))


def test_who_is_behind_with_another_result_is_outvoted():
    agreed = agree([MemberStatus(6, voted=5), MemberStatus(7, committed=5), MemberStatus(6, voted=4)], SHARDS)
    assert (agreed.late, agreed.outvoted) == ({0, 2}, {2})


def test_sums_of_a_round_that_is_over_do_not_count():
    agreed = agree([MemberStatus(6, ((0, 12),)), MemberStatus(7)], SHARDS)
    assert agreed.deal == deal_evenly(SHARDS, 2)


def test_nobody_may_be_two_rounds_behind():
    with pytest.raises(ValueError, match=r"ranks \[0\] are more than one round behind round 7"):
        agree([MemberStatus(5), MemberStatus(7)], SHARDS)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(6, 40))
def test_no_deal_makes_the_longest_share_shorter(costs, shards):
    now = even_counts(shards, len(costs))
    counts = fair_counts(shards, costs, now)
    assert sum(counts) == shards
    assert min(counts) >= 1
    longest = max(count * cost for count, cost in zip(counts, costs, strict=True))
    assert longest <= max(count * cost for count, cost in zip(now, costs, strict=True))
    if counts != now:  # moving one shard from the slowest rank to any other does not help
        slowest = max(range(len(costs)), key=lambda rank: counts[rank] * costs[rank])
        others = [(counts[rank] + 1) * cost for rank, cost in enumerate(costs) if rank != slowest]
        assert counts[slowest] == 1 or all(each >= longest for each in others)


@pytest.mark.parametrize(("shards", "ranks"), [(4, 3), (3, 2), (8, 7), (8, 6), (16, 15)])
def test_survivors_add_up_in_the_core_where_they_can(shards, ranks):
    assert is_tree_over_ranks(Node(0, shards), deal_runs(even_counts(shards, ranks)))


def test_a_deal_that_the_core_cannot_add_must_be_worth_more():
    assert fair_counts(4, [8, 10, 10], [1, 1, 2]) == [1, 1, 2]
    assert fair_counts(4, [7, 10, 10], [1, 1, 2]) == [2, 1, 1]


def test_small_differences_of_speed_change_nothing():
    assert fair_counts(12, [100, 105, 98, 103], [3, 3, 3, 3]) == [3, 3, 3, 3]


def test_a_member_of_unknown_speed_counts_as_a_usual_one():
    assert fair_counts(12, [10, 0, 30, 10], [3, 3, 3, 3]) == fair_counts(12, [10, 10, 30, 10], [3, 3, 3, 3])


def test_a_follower_is_a_guest_until_its_state_was_compared():
    followed = MemberStatus(7, committed=3, has_followed=True)
    agreed = agree(
        [MemberStatus(7, committed=3), followed, MemberStatus(7, committed=3, guest_until=9), MemberStatus(FRESH)], 1
    )
    assert agreed.guest_until == (0, 7 + WINDOWS, 9, 0)
    assert [agreed.guests(number) for number in (8, 9, 6 + WINDOWS, 7 + WINDOWS)] == [{1, 2}, {1}, {1}, set()]
