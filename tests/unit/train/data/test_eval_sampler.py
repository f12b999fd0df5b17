from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline import DistributedEvalSampler


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 200), st.integers(1, 32))
def test_every_sample_is_on_exactly_one_rank(length, ranks):
    samplers = [DistributedEvalSampler(range(length), ranks, rank) for rank in range(ranks)]
    parts = [list(sampler) for sampler in samplers]
    assert sorted(index for part in parts for index in part) == list(range(length))
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rank_out_of_range_is_refused_with_the_range():
    with pytest.raises(ValueError, match="rank is 2; with num_replicas 2 it must be from 0 to 1"):
        DistributedEvalSampler(range(4), num_replicas=2, rank=2)


def test_values_that_are_not_one_a_sample_are_refused():
    with pytest.raises(ValueError, match=r"rank 1: gather got values of shape \(3,\); the first dimension must be 2"):
        DistributedEvalSampler(range(5), num_replicas=2, rank=1).gather(torch.ones(3))
