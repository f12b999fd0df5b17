"""A worker's progress: sums that it has already computed, and the shards of each member."""

from __future__ import annotations

import torch

from paceline.train.elastic.agreement import deal_evenly
from paceline.train.elastic.worker.progress import PartialSums, ShardAssignment


def computed(sums: PartialSums, shards: int, ranks: int, rank: int) -> list[int]:
    """Computes a rank's sums of `shards` shards; returns the shards whose values had to be computed."""
    asked: list[int] = []

    def value_of(shard: int) -> list[torch.Tensor]:
        asked.append(shard)
        return [torch.tensor([float(shard)])]

    sums.compute(deal_evenly(shards, ranks), rank, value_of, None, is_step=True)
    return asked


def test_sums_that_are_held_are_not_computed_again():
    sums = PartialSums()
    assert sorted(computed(sums, 8, 2, 0)) == [0, 1, 2, 3]
    assert computed(sums, 8, 2, 0) == []
    assert sums.shard_ns > 0
    sums.forget()
    assert sorted(computed(sums, 8, 2, 0)) == [0, 1, 2, 3]


def test_the_shards_of_the_members_follow_each_other():
    assignment = ShardAssignment(8)
    assignment.counts = [3, 3, 2]
    assignment.begin_round()
    assert [list(assignment.of(rank)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    held = [sorted(shard for node in deal for shard in range(node.first, node.stop)) for deal in assignment.deal]
    assert held == [list(assignment.of(rank)) for rank in range(3)]


def test_members_of_equal_speed_keep_their_counts():
    assignment = ShardAssignment(8)
    assignment.counts = [4, 4]
    assert not assignment.adapt([1000, 1000])
    assert assignment.counts == [4, 4]
