"""Conversion of ranks, and checks of roots and peers, without a group."""

from __future__ import annotations

import pytest

from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group.call_plan import RankMap

MEMBERS = [RankIdentity(rank, "node", 100 + rank) for rank in (2, 5, 7)]


@pytest.fixture
def rank_map() -> RankMap:
    return RankMap(MEMBERS, 1, "ProcessGroup(evens, rank 1 of 3)")


def test_a_rank_is_found_by_either_number(rank_map):
    assert (rank_map.size, rank_map.rank, rank_map.me.rank) == (3, 1, 5)
    assert rank_map.root_rank(7, None, "broadcast", "src") == 2
    assert rank_map.root_rank(None, 0, "broadcast", "src") == 0
    assert rank_map.root_rank(None, None, "gather", "dst", 0) == 0
    assert rank_map.group_rank_of(2, "get_group_rank", "global_rank") == 0


@pytest.mark.parametrize(
    ("rank", "group_rank", "words"),
    [
        (2, 0, "broadcast: src and group_src are mutually exclusive"),
        (None, None, r"broadcast needs src \(a rank of the default group\) or group_src"),
        (3, None, r"src is 3, which is not in ProcessGroup\(evens, rank 1 of 3\); its members are \[2, 5, 7\]"),
        (None, 3, r"group_src is 3; ProcessGroup\(evens, rank 1 of 3\) has ranks 0 to 2"),
    ],
)
def test_an_unknown_root_is_rejected(rank_map, rank, group_rank, words):
    with pytest.raises(ValueError, match=words):
        rank_map.root_rank(rank, group_rank, "broadcast", "src")


def test_a_root_that_is_no_number_is_named(rank_map):
    with pytest.raises(TypeError, match=r"src is 'zero' \(str\); a rank is an integer"):
        rank_map.root_rank("zero", None, "broadcast", "src")


def test_a_root_outside_the_group_is_reported_with_this_rank(rank_map):
    rank_map.require_root(2, "reduce")
    rank_map.require_peer(2, "send", "dst")
    with pytest.raises(ValueError, match="rank 5: reduce: the root is group rank 3"):
        rank_map.require_root(3, "reduce")
    with pytest.raises(ValueError, match="rank 5: send: dst is group rank -1"):
        rank_map.require_peer(-1, "send", "dst")
    with pytest.raises(ValueError, match="send: dst is rank 5, this one; a rank cannot send to itself"):
        rank_map.require_peer(1, "send", "dst")
