"""The batches of logical shards, and their random streams."""

from __future__ import annotations

import itertools
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.logical_shards.shard_batches import EpochPlan, random_stream


def test_a_random_stream_depends_on_its_key_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with random_stream(1, 2):
        first = (torch.rand(2).tolist(), random.random())
    assert torch.equal(torch.rand(1), expected)
    with random_stream(1, 2):
        assert (torch.rand(2).tolist(), random.random()) == first
    with random_stream(1, 3):
        assert (torch.rand(2).tolist(), random.random()) != first


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_plan_has_each_sample_once(samples, shards, batch_size, shuffle):
    plan = EpochPlan.of(1, samples, shards, batch_size, seed=3, shuffle=shuffle)
    steps = range(-(-samples // (shards * batch_size)))
    planned = [plan.samples_of(step, shard) for step in steps for shard in range(shards)]
    assert sorted(itertools.chain(*planned)) == [*range(samples)]
    assert [*map(len, planned)] == [plan.count_of(step, shard) for step in steps for shard in range(shards)]
    assert [rest for _, *rest in plan.batches(steps, range(shards))] == [each for each in planned if each]
