"""Checks of gradients and replicas: their schedule, conclusions, and messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.train.checks.device_values import DeviceDigests
from paceline.train.checks.replica_check import (
    DisagreeingRanks,
    RankDigests,
    ReplicaDifference,
    compare_digests,
    differing_names,
    digests_of_part,
    optimizers_part,
    random_part,
)


def digests(*totals: int) -> list[RankDigests]:
    return [RankDigests(1, total) for total in totals]


@pytest.mark.parametrize(
    ("totals", "text"),
    [
        ((5, 5, 6), "rank 12 differs from ranks 10 and 11"),
        ((7, 5, 5, 6), "ranks 10 and 13 differ from ranks 11 and 12"),
        ((5, 6), "ranks 10 and 11 differ, and there is no majority"),
        ((5, 6, 5, 6), "ranks differ, and there is no majority: ranks 10 and 12; ranks 11 and 13"),
    ],
)
def test_the_majority_is_taken_for_the_truth(totals, text):
    sides = compare_digests(digests(*totals))
    assert sides is not None
    assert sides.describe([10, 11, 12, 13]) == text


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_sides_hold_every_rank_once(totals):
    sides = compare_digests(digests(*totals))
    assert (sides is None) == (len(set(totals)) == 1)
    if sides is not None:
        assert sorted(rank for side in sides.sides for rank in side) == list(range(len(totals)))
        assert all(len({totals[rank] for rank in side}) == 1 for side in sides.sides)
        most = max(map(totals.count, totals))
        assert sides.has_majority == ([totals.count(each) for each in set(totals)].count(most) == 1)


def test_only_ranks_that_hold_the_same_things_are_compared():
    assert compare_digests([RankDigests(1, 5), RankDigests(2, 6), RankDigests(3, 7)]) is None
    assert compare_digests([RankDigests(0, 5), RankDigests(0, 6)]) is None
    assert compare_digests([RankDigests(1, 5), RankDigests(2, 6), RankDigests(1, 7)]) == DisagreeingRanks(((0,), (2,)))


def test_the_first_name_that_differs_is_found():
    everyones = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "c": 8}]
    sides = DisagreeingRanks(((0, 1), (2,)))
    names = differing_names(sides, everyones)
    assert names == ["b", "c"]
    told = ReplicaDifference("parameters", sides, tuple(names), 3).describe([0, 1, 2])
    assert told == "rank 2 differs from ranks 0 and 1 in 2 of 3 parameters, first in b"


def stepped(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias], "lr": lr}], 0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizers_settings_and_states_have_names():
    module = nn.Linear(2, 2)
    params = dict(module.named_parameters())
    part = optimizers_part([stepped(module, 0.2)], params, DeviceDigests())
    other = optimizers_part([stepped(module, 0.3)], params, DeviceDigests())
    assert digests_of_part(part).shape == digests_of_part(other).shape
    assert "'momentum_buffer' of SGD for 'weight'" in part
    assert "'lr' of SGD's group 1" in [name for name in part if part[name] != other[name]]


def test_optimizers_of_other_modules_are_left_out():
    module = nn.Linear(2, 2)
    assert optimizers_part([stepped(module)], dict(nn.Linear(2, 2).named_parameters()), DeviceDigests()) == {}


def test_random_states_differ_after_a_draw():
    before = random_part()
    torch.rand(1)
    after = random_part()
    assert [name for name in before if before[name] != after[name]] == ["torch's random state"]
