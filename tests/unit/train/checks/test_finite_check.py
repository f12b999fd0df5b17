"""Non-finite gradients: the tensors that contain them, and when they are reported."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.comm.record import log
from paceline.train.checks.device_values import DeviceNorms
from paceline.train.checks.finite_check import (
    DeviceOutcome,
    NonFiniteGradients,
    NonFiniteHistory,
    NonFiniteTensor,
    find_non_finite,
    spread_out,
)

ODD = NonFiniteTensor(1, "b", 1, 0, 4)


def finding(step: int, *, spoiled: bool = False) -> NonFiniteGradients:
    return NonFiniteGradients(0, step, [ODD], 3, [ODD] if spoiled else [])


@given(st.integers(1, 5000))
def test_a_few_are_chosen_among_them_the_last(count):
    chosen = spread_out(count)
    assert chosen[0] == count - 1
    assert len(chosen) <= 15
    assert chosen[-1] < max(1, count / 4)


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
    norms.add("gradient", enumerate(tensors))
    norms.add("average", enumerate(others))
    (copy,) = norms.enqueue_copies()
    found = DeviceOutcome(5, [copy]).read()
    assert list(found["gradient"]) == [1, 2] and math.isnan(found["gradient"][1]) and math.isinf(found["gradient"][2])
    assert found["average"] == {} == found["parameter"]
    assert not norms


def test_odd_gradients_are_told_once_they_are_applied():
    history = NonFiniteHistory()
    assert history.not_finite(finding(3)) is None
    told = history.applied()
    assert told is not None
    assert told.step == 3
    assert history.has_warned
    assert history.not_finite(finding(4)) is None
    assert history.applied() is None
    history.finite(average_is_finite=True)
    assert history.not_finite(finding(6)) is None
    assert history.applied() == finding(6)


def test_odd_gradients_that_nobody_applies_are_forgotten():
    history = NonFiniteHistory()
    history.not_finite(finding(1))
    history.not_finite(finding(2))
    history.finite(average_is_finite=True)
    assert history.applied() is None


def test_a_rank_is_silent_about_what_an_average_brought():
    history = NonFiniteHistory()
    history.finite(average_is_finite=False)
    assert history.not_finite(finding(2, spoiled=True)) is None
    assert history.pending is None


def test_parameters_that_something_else_spoiled_are_told():
    history = NonFiniteHistory()
    history.finite(average_is_finite=True)
    assert history.not_finite(finding(2, spoiled=True)) == finding(2, spoiled=True)
    assert history.not_finite(finding(3, spoiled=True)) is None


def test_gradients_applied_without_an_optimizer_are_told():
    history = NonFiniteHistory()
    history.not_finite(finding(1))
    assert history.not_finite(finding(2, spoiled=True)) == finding(1)


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
