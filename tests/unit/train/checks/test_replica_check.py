"""Checks of gradients and replicas: their schedule, conclusions, and messages."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.comm.record import log
from paceline.train.checks import device_values
from paceline.train.checks.check_settings import Checks, choose_checks
from paceline.train.checks.device_values import DeviceDigests, DeviceNorms
from paceline.train.checks.finite_check import (
    DeviceOutcome,
    NonFiniteGradients,
    NonFiniteHistory,
    NonFiniteTensor,
    find_non_finite,
    spread_out,
)
from paceline.train.checks.optimizer_steps import CheckInterval, StepClock
from paceline.train.checks.replica_check import (
    DisagreeingRanks,
    RankDigests,
    ReplicaDifference,
    StateDigests,
    compare_digests,
    differing_names,
    optimizers_part,
    random_part,
    tensors_part,
)
from paceline.train.module_tensors import digest_of

ODD = NonFiniteTensor(1, "b", 1, 0, 4)


def finding(step: int, *, spoiled: bool = False) -> NonFiniteGradients:
    return NonFiniteGradients(0, step, [ODD], 3, [ODD] if spoiled else [])


# - When something is looked at


def test_a_check_takes_no_more_than_its_share():
    pace, spent_s, step = CheckInterval(0.01), 0.0, 1
    while step < 10_000:
        if pace.is_due(step):
            spent_s += 0.004
            pace.plan(step, 0.004, 0.02)
        step += 1
    assert 0.005 < spent_s / (10_000 * 0.02) <= 0.0101


def test_one_slow_check_does_not_put_off_the_next_for_long():
    pace = CheckInterval(0.01)
    pace.plan(1, 0.001, 0.1)
    assert pace.next == 2
    pace.plan(2, 100.0, 0.1)
    assert pace.next == 4


def test_a_fixed_pace_ignores_costs():
    pace = CheckInterval(0.01, first=10, least=100, fixed=3)
    assert not pace.is_due(2)
    assert pace.is_due(3)
    pace.plan(3, 100.0, math.inf)
    assert pace.next == 6


def test_a_step_takes_as_long_as_the_shortest_of_late():
    clock = StepClock()
    for now_s in (0, 5, 6, 16):
        clock.tick(now_s)
    assert 1 <= clock.shortest_s <= 1.02
    for now_s in range(20, 2000, 4):
        clock.tick(now_s)
    assert clock.shortest_s == pytest.approx(4, rel=0.02)


@given(st.integers(1, 5000))
def test_a_few_are_chosen_among_them_the_last(count):
    chosen = spread_out(count)
    assert chosen[0] == count - 1
    assert len(chosen) <= 15
    assert chosen[-1] < max(1, count / 4)


# - What is odd


def test_odd_tensors_are_counted():
    tensors = [torch.ones(3), torch.tensor([1, math.nan, -math.inf, math.inf]), torch.ones(2, dtype=torch.int32)]
    (found,) = find_non_finite(zip(range(3), "abc", tensors, strict=True))
    assert (found.position, found.name, found.nans, found.infs, found.numel) == (1, "b", 1, 2, 4)


def test_the_numbers_of_a_sparse_tensor_are_those_of_its_rows():
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([[1.0, math.nan], [3, 4]]), (4, 2), check_invariants=False
    )
    (found,) = find_non_finite([(0, "a", sparse), (1, "b", torch.zeros(4, 2).to_sparse())])
    assert (found.name, found.nans, found.numel) == ("a", 1, 4)


def test_norms_of_a_device_tell_which_tensors_are_odd():
    tensors = [torch.ones(3), torch.tensor([1, math.nan, math.inf]), torch.tensor([[-math.inf, 2.0]])]
    others = [
        torch.ones(0),
        torch.ones(3, dtype=torch.int32),
        torch.full((2, 2), 1 + 2j),
        torch.tensor([1e300], dtype=torch.float64),
    ]
    norms = DeviceNorms()
    norms.add("gradient", range(3), tensors)
    norms.add("average", range(4), others)
    (copy,) = norms.enqueue_copies()
    found = DeviceOutcome(5, [copy]).read()
    assert list(found["gradient"]) == [1, 2] and math.isnan(found["gradient"][1]) and math.isinf(found["gradient"][2])
    assert found["average"] == {} == found["parameter"]
    assert not norms


def test_a_step_is_applied_unless_it_was_left_out():
    for found_inf, is_applied in ((None, True), (torch.zeros(1), True), (torch.ones(()), False)):
        outcome = DeviceOutcome(1, [])
        outcome.note_step(found_inf)
        assert outcome.is_complete()
        outcome.read()
        assert outcome.is_applied is is_applied


def test_odd_gradients_are_told_once_they_are_applied():
    story = NonFiniteHistory()
    assert story.not_finite(finding(3)) is None
    told = story.applied()
    assert told is not None
    assert told.step == 3
    assert story.has_warned
    assert story.not_finite(finding(4)) is None
    assert story.applied() is None
    story.finite(average_is_finite=True)
    assert story.not_finite(finding(6)) is None
    assert story.applied() == finding(6)


def test_odd_gradients_that_nobody_applies_are_forgotten():
    story = NonFiniteHistory()
    story.not_finite(finding(1))
    story.not_finite(finding(2))
    story.finite(average_is_finite=True)
    assert story.applied() is None


def test_a_rank_is_silent_about_what_an_average_brought():
    story = NonFiniteHistory()
    story.finite(average_is_finite=False)
    assert story.not_finite(finding(2, spoiled=True)) is None
    assert story.pending is None


def test_parameters_that_something_else_spoiled_are_told():
    story = NonFiniteHistory()
    story.finite(average_is_finite=True)
    assert story.not_finite(finding(2, spoiled=True)) == finding(2, spoiled=True)
    assert story.not_finite(finding(3, spoiled=True)) is None


def test_gradients_applied_without_an_optimizer_are_told():
    story = NonFiniteHistory()
    story.not_finite(finding(1))
    assert story.not_finite(finding(2, spoiled=True)) == finding(1)


def test_the_message_names_rank_step_and_parameters():
    first, last = NonFiniteTensor(0, "a", 3, 0, 9), NonFiniteTensor(2, "c", 1, 2, 4)
    text = NonFiniteGradients(2, 8, [first, last], 4).text(applied=True)
    assert "rank 2: in step 8" in text
    assert "of 2 of 4 parameters" in text
    assert "first reached 'c' (1 NaN and 2 infinite of 4 numbers)" in text
    assert "spread to 'a' (3 NaN" in text
    assert "an optimizer has applied" in text
    assert "of all 2 parameters, so the loss" in NonFiniteGradients(2, 8, [first, last], 2).text(applied=False)


@pytest.mark.parametrize(
    ("logged", "told"),
    [
        ({"loss": math.nan}, ["loss is nan before the first step"]),
        ({"best": math.inf}, []),
        ({"score": 1.0}, []),
    ],
)
def test_the_first_odd_number_that_is_logged_is_told(monkeypatch, logged, told):
    monkeypatch.setattr(log, "_was_finite", {})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            paceline.log(**logged)
    assert [text in str(each.message) for each, text in zip(warned, told, strict=True)] == [True] * len(told)


def test_a_number_that_was_finite_is_told_when_it_is_not(monkeypatch):
    monkeypatch.setattr(log, "_was_finite", {})
    paceline.log(score=1.0)
    with pytest.warns(RuntimeWarning, match="score is inf"):
        paceline.log(score=math.inf)


# - Who differs


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


# - What a replica consists of


def test_digests_tell_tensors_apart():
    grid = torch.arange(6.0).reshape(2, 3)
    assert digest_of([grid]) == digest_of([grid.t().contiguous().t()])
    assert digest_of([grid]) != digest_of([grid + 1])
    part, other = (tensors_part({name: grid}, DeviceDigests()) for name in "ab")
    assert part.digests() != other.digests()
    assert StateDigests({}).digests() == RankDigests(0, 0)


def device_digests(tensors: list[torch.Tensor]) -> list[int]:
    """Returns the digests that a device would compute, computed on the CPU."""
    values: dict[str, int] = {}
    digests = DeviceDigests()
    for number, tensor in enumerate(tensors):
        digests.add(values, str(number), tensor)
    digests.read()
    return list(values.values())


BIG = 40_001  # float32 numbers, more than are hashed together with others


def test_a_device_tells_tensors_apart_by_each_of_their_bytes():
    grid, vector, big = torch.arange(6.0).reshape(2, 3), torch.arange(5, dtype=torch.bfloat16), torch.randn(BIG)
    tensors = [grid, torch.ones(()), torch.ones(0), vector, big[1:], torch.tensor([True, False]), big.double()]
    digests = device_digests(tensors)
    assert digests == device_digests([tensor.clone() for tensor in tensors])
    assert digests[0] == device_digests([grid.t().contiguous().t(), *tensors[1:]])[0]
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
            changed = tensor.clone()
            memory = changed.view(-1).view(torch.uint8)
            memory[at * tensor.element_size()] ^= 1
            others = device_digests([*tensors[:number], changed, *tensors[number + 1 :]])
            assert [left != right for left, right in zip(digests, others, strict=True)] == [
                each == number for each in range(len(tensors))
            ]


def test_a_device_sees_signs_and_places_that_change():
    for size in (6, BIG):
        values = torch.randn(size, dtype=torch.float64)
        signs, places = values.clone(), values.clone()
        signs[1:3] *= -1
        places[[1, 2]] = values[[2, 1]]
        assert len({*device_digests([values]), *device_digests([signs]), *device_digests([places])}) == 3
        assert device_digests([values]) != device_digests([-values])


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    monkeypatch.setattr(device_values, "_WORDS", 1 << 13)
    tensors = [torch.randn(BIG), *(torch.randn(900) for _ in range(40))]
    digests = device_digests(tensors)
    assert len(set(digests)) == len(tensors)
    tensors[0][-1] += 1
    assert [left != right for left, right in zip(digests, device_digests(tensors), strict=True)] == [True] + [
        False
    ] * 40


def test_tensors_without_memory_are_left_out():
    named = {"a": torch.ones(2), "b": torch.ones(2).to_sparse(), "c": torch.ones(2, device="meta")}
    assert list(tensors_part(named, DeviceDigests()).values) == ["'a'"]


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
    assert part.digests().shape == other.digests().shape
    assert "'momentum_buffer' of SGD for 'weight'" in part.values
    assert "'lr' of SGD's group 1" in [name for name in part.values if part.values[name] != other.values[name]]


def test_optimizers_of_other_modules_are_left_out():
    module = nn.Linear(2, 2)
    assert optimizers_part([stepped(module)], dict(nn.Linear(2, 2).named_parameters()), DeviceDigests()).values == {}


def test_random_states_differ_after_a_draw():
    before = random_part()
    torch.rand(1)
    after = random_part()
    assert [name for name in before.values if before.values[name] != after.values[name]] == ["torch's random state"]


# - What the user says


@pytest.mark.parametrize(
    ("argument", "variable", "chosen"),
    [
        (None, None, Checks(True)),
        (None, "off", Checks(False)),
        (None, "500", Checks(True, 500)),
        (True, "off", Checks(True)),
        (False, "on", Checks(False)),
        (0, None, Checks(False)),
        (20, None, Checks(True, 20)),
    ],
)
def test_the_argument_prevails_over_the_variable(monkeypatch, argument, variable, chosen):
    monkeypatch.delenv("PACELINE_CHECKS", raising=False)
    if variable is not None:
        monkeypatch.setenv("PACELINE_CHECKS", variable)
    assert choose_checks(argument) == chosen


@pytest.mark.parametrize(("argument", "variable"), [(-1, "on"), (None, "0"), (None, "often")])
def test_values_that_mean_nothing_are_refused(monkeypatch, argument, variable):
    monkeypatch.setenv("PACELINE_CHECKS", variable)
    with pytest.raises(ValueError, match="steps from one comparison of the replicas to the next"):
        choose_checks(argument)
