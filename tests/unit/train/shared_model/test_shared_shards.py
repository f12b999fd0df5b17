"""The parts of a shared model: slices, a guard, Lion, and the error in elastic jobs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as dist
from paceline.train.shared_model.shared_parameters import TornGuard
from paceline.train.shared_model.shared_shards import cut_evenly, divide_whole

PATIENTLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.lists(st.integers(0, 3000), max_size=30)


@PATIENTLY
@given(SIZES, st.integers(1, 9), st.integers(1, 2000), st.sampled_from([1, 16, 64]))
def test_rounds_take_each_element_once_and_in_order(sizes, ranks, round_size, alignment):
    rounds = cut_evenly(sizes, ranks, round_size, alignment)
    elements = [(run.param, at) for each in rounds for owned in each for run in owned for at in (run.start, run.stop)]
    covered = [0] * len(sizes)
    for (param, start), (same, stop) in zip(elements[0::2], elements[1::2], strict=True):
        assert param == same
        assert start == covered[param] < stop
        covered[param] = stop
    assert covered == sizes
    assert elements == sorted(elements)


@PATIENTLY
@given(SIZES, st.integers(1, 9), st.integers(1, 2000), st.sampled_from([1, 16, 64]))
def test_slices_are_even_and_cut_at_cache_lines(sizes, ranks, round_size, alignment):
    rounds = cut_evenly(sizes, ranks, round_size, alignment)
    even = sum(sizes) / max(1, len(rounds) * ranks)
    for each in rounds:
        assert len(each) == ranks
        for owned in each:
            assert abs(sum(run.numel for run in owned) - even) <= alignment + 1
            assert all(run.start % alignment == 0 for run in owned)
            assert all(run.stop in (sizes[run.param], run.stop // alignment * alignment) for run in owned)


@PATIENTLY
@given(SIZES, st.integers(1, 9))
def test_whole_parameters_have_one_owner(sizes, ranks):
    (owned,) = divide_whole(sizes, ranks)
    assert len(owned) == ranks
    assert sorted(run for runs in owned for run in runs) == [(at, 0, size) for at, size in enumerate(sizes)]


def test_a_guard_raises_while_there_is_a_reason():
    model = nn.Linear(2, 2)
    guard = TornGuard()
    guard.watch(model)
    model(torch.ones(2))
    guard.reason = "half of it"
    for use in (lambda: model(torch.ones(2)), model.state_dict, nn.Sequential(model).state_dict):
        with pytest.raises(RuntimeError, match="half of it"):
            use()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(2))
        twin.state_dict()


def test_lion_moves_by_the_sign_of_its_momentum():
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = dist.Lion([param], lr=0.1, betas=(0.5, 0.75), weight_decay=0.2)
    momentum, expected = torch.zeros(3, dtype=torch.float64), param.detach().clone()
    for gradient in (torch.tensor([1.0, -1.0, 0.0]).double(), torch.tensor([-3.0, 0.5, 1.0]).double()):
        param.grad = gradient
        optimizer.step()
        direction = (0.5 * momentum + 0.5 * gradient).sign()
        expected = expected - 0.1 * (direction + 0.2 * expected)
        momentum = 0.75 * momentum + 0.25 * gradient
        torch.testing.assert_close(param.detach(), expected)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.5)}, {"weight_decay": -0.1}])
def test_lion_says_which_arguments_are_wrong(wrong):
    with pytest.raises(ValueError, match="Lion got lr="):
        dist.Lion([nn.Parameter(torch.zeros(1))], **wrong)


def test_elastic_jobs_refuse_shared_parameters(no_secret):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = dist.SharedModelOptimizer(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="half updated for those that survive"):
            dist.ElasticState(dist.LogicalShards(model, 2), optimizer=optimizer)
        with pytest.raises(ValueError, match="the model of a SharedModelOptimizer, with which all workers"):
            dist.ElasticState(dist.LogicalShards(model, 2))
    finally:
        dist.destroy_process_group()
