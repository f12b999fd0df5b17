"""Paceline's hooks compute averages to within their precision, and training with them converges."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from training import average_gradients, batches, gradients, mlp, require_equal_on_all_ranks, require_gradients
from world import Ranks

import paceline as dist
from paceline.train.ddp import hooks


def compressed_gradients() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for hook, state, tolerance in (
        (hooks.allreduce_hook, None, 1e-6),
        (hooks.fp16_compress_hook, None, 0.01),
        (hooks.bf16_compress_hook, None, 0.05),
        (hooks.int8_hook, hooks.Int8State(block_size=16), 0.05),
        (hooks.power_sgd_hook, hooks.PowerSGDState(start_powerSGD_iter=0, matrix_approximation_rank=3), 10.0),
        (hooks.power_sgd_hook, hooks.PowerSGDState(start_powerSGD_iter=1), 1e-6),
    ):
        module = mlp(width=32)
        expected = average_gradients(module, lambda m: [m(x).sum() for x in batches(4, 32)])
        wrapped = dist.DistributedDataParallel(module, bucket_cap_mb=0.005)
        wrapped.register_comm_hook(state, hook)
        wrapped(batches(4, 32)[rank]).sum().backward()
        require_gradients(module, expected, tolerance)
        require_equal_on_all_ranks(gradients(module))


def test_every_hook_averages_to_its_precision(ranks):
    ranks(3)(compressed_gradients)


def complex_gradients() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(20, 30, dtype=torch.complex64))
    for hook, state in (
        (hooks.fp16_compress_hook, None),
        (hooks.int8_hook, hooks.Int8State()),
        (hooks.power_sgd_hook, hooks.PowerSGDState(start_powerSGD_iter=0)),
    ):
        gradient = torch.full((600,), complex(rank, 1 - rank))
        average = hook(state, dist.GradBucket(0, True, gradient, [parameter])).wait()
        assert (average == complex(0.5, 0.5)).all()


def test_complex_gradients_are_averaged_uncompressed(ranks):
    ranks(2)(complex_gradients)


def what_is_lost_comes_later() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    parameter = nn.Parameter(torch.zeros(20, 30))
    for hook, state in (
        (hooks.int8_hook, hooks.Int8State(block_size=600)),
        (hooks.power_sgd_hook, hooks.PowerSGDState(start_powerSGD_iter=0, matrix_approximation_rank=4)),
    ):
        gradient = torch.randn(600, generator=generator)
        average = gradient.clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        total = torch.zeros(600)
        errors = []
        for step in range(1, 65):
            total += hook(state, dist.GradBucket(0, True, gradient.clone(), [parameter])).wait()
            errors.append(float((total / step - average).norm() / average.norm()))
        assert errors[63] < errors[0] / 8, errors[::8]


def test_error_feedback_makes_the_sum_of_many_steps_right(ranks):
    ranks(2)(what_is_lost_comes_later)


def overflow_once() -> None:
    dist.init_process_group()
    parameter = nn.Parameter(torch.zeros(20, 30))
    for hook, state in (
        (hooks.int8_hook, hooks.Int8State()),
        (hooks.power_sgd_hook, hooks.PowerSGDState(start_powerSGD_iter=0)),
    ):
        for bad in (float("inf"), float("nan")):
            gradient = torch.ones(600)
            gradient[7] = bad
            assert not hook(state, dist.GradBucket(0, True, gradient, [parameter])).wait().isfinite().all()
            after = hook(state, dist.GradBucket(0, True, torch.ones(600), [parameter])).wait()
            torch.testing.assert_close(after, torch.ones(600), rtol=0.02, atol=0.02)


def test_an_overflow_lasts_for_one_step_only(ranks):
    ranks(2)(overflow_once)


HOOKS = {
    "none": (None, lambda: None),
    "allreduce": (hooks.allreduce_hook, lambda: None),
    "fp16": (hooks.fp16_compress_hook, lambda: None),
    "bf16": (hooks.bf16_compress_hook, lambda: None),
    "int8": (hooks.int8_hook, hooks.Int8State),
    "PowerSGD": (
        hooks.power_sgd_hook,
        lambda: hooks.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=10),
    ),
}


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads scikit-learn's digits from their file, because importing scikit-learn takes longer than the training."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    rows = torch.from_numpy(numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=","))
    return rows[:, :-1].float().reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()


def train_digits(kind: str) -> float:
    """Trains a smaller version of the model in examples/digits.py for three epochs; returns the test accuracy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    model = dist.DistributedDataParallel(module)
    hook, make_state = HOOKS[kind]
    if hook is not None:
        model.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sampler = dist.DistributedSampler(train)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        mine = train[torch.tensor(list(sampler))]
        for chosen in mine.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    require_equal_on_all_ranks(model.parameters())
    model.eval()
    with torch.no_grad():
        right = (model(images[test[rank::size]]).argmax(1) == labels[test[rank::size]]).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


def train_digits_with_every_hook() -> dict[str, float]:
    dist.init_process_group()
    return {kind: train_digits(kind) for kind in HOOKS}


@functools.cache
def accuracies() -> dict[str, float]:
    """Trains with each hook in one world; returns the accuracies by hook."""
    return Ranks(2)(train_digits_with_every_hook)[0]


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind != "none"])
def test_training_with_a_hook_recognizes_as_many_digits(ranks, kind):
    assert accuracies()[kind] >= accuracies()["none"] - 0.015
