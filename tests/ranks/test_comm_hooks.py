"""Communication hooks: their arguments and futures, and that training with them converges."""

from __future__ import annotations

import copy
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

TINY_BUCKETS = {"bucket_cap_mb": 0.0003, "overlap": True}  # one for each layer


def sees_buckets() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(144, 2))
    wrapped = dist.DistributedDataParallel(module, bucket_cap_mb=0.001, overlap=True)
    expected = average_gradients(module, lambda m: [m(x).square().mean() for x in batches(2, 3, 8, 8)])
    seen: list[tuple[int, bool, int]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
        assert state == "mine"
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert all(any(p is q for q in module.parameters()) for p in bucket.parameters())
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        return hooks.allreduce_hook(None, bucket)

    wrapped.register_comm_hook("mine", hook)
    wrapped(batches(2, 3, 8, 8)[rank]).square().mean().backward()
    assert seen == [(0, False, 2), (1, False, 288), (2, True, 112)]
    require_gradients(module, expected)


def test_a_hook_sees_every_bucket_once_with_its_parameters(ranks):
    ranks(2)(sees_buckets)


def futures_of_any_kind() -> None:
    dist.init_process_group()
    rank = dist.get_rank()

    def returns_work(_: object, bucket: dist.GradBucket) -> dist.Work:
        return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)

    def returns_torchs_future(_: object, bucket: dist.GradBucket) -> torch.futures.Future:
        dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def chains(_: object, bucket: dist.GradBucket) -> torch.futures.Future:
        first = hooks.future_of(dist.all_reduce(bucket.buffer(), async_op=True))

        def halve_by_another_call(done: torch.futures.Future) -> torch.Tensor:
            half = torch.full_like(done.value()[0], 0.25)
            dist.all_reduce(half)  # in the callback, in the same order on every rank
            return done.value()[0] * half

        return first.then(halve_by_another_call)

    def returns_the_works_own(_: object, bucket: dist.GradBucket) -> torch.futures.Future:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    for hook in (returns_work, returns_torchs_future, chains, returns_the_works_own):
        for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}, {"static_graph": True}):
            module = mlp()
            expected = average_gradients(module, lambda m: [m(x).sum() for x in batches(4, 8)])
            wrapped = dist.DistributedDataParallel(module, **options)
            wrapped.register_comm_hook(None, hook)
            for _ in range(2):
                module.zero_grad()
                wrapped(batches(4, 8)[rank]).sum().backward()
                require_gradients(module, expected)


def test_a_hook_may_return_any_future_or_a_work(ranks):
    ranks(2)(futures_of_any_kind)


def torchs_own() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    dist.init_process_group()
    rank = dist.get_rank()
    module = mlp()
    expected = average_gradients(module, lambda m: [m(x).sum() for x in batches(4, 8)])
    for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        wrapped = dist.DistributedDataParallel(copy.deepcopy(module))
        wrapped.register_comm_hook(None, wrapper(hooks.allreduce_hook))
        wrapped(batches(4, 8)[rank]).sum().backward()
        require_gradients(wrapped.module, expected, tolerance=0.05)
    alone = dist.DistributedDataParallel(copy.deepcopy(module))
    alone.register_comm_hook(None, debugging_hooks.noop_hook)
    alone(batches(4, 8)[rank]).sum().backward()
    module(batches(4, 8)[rank]).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(alone.module), gradients(module), strict=True))


def test_torchs_hooks_that_need_only_the_bucket_work_unmodified(ranks):
    ranks(2)(torchs_own)


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


def hooks_that_go_wrong() -> None:
    dist.init_process_group()
    x = torch.ones(1, 8)

    def wrapped_with(hook: object) -> nn.Module:
        wrapped = dist.DistributedDataParallel(mlp())
        wrapped.register_comm_hook(None, hook)
        return wrapped

    with pytest.raises(TypeError, match=r"hook is a int; it must be callable as hook\(state, bucket\)"):
        wrapped_with(3)
    with pytest.raises(RuntimeError, match=r"called twice on this module; wrap the module again"):
        wrapped_with(hooks.allreduce_hook).register_comm_hook(None, hooks.allreduce_hook)
    with pytest.raises(TypeError, match=r"hook .*<lambda> returned Tensor; it must return a torch\.futures\.Future"):
        wrapped_with(lambda _, bucket: bucket.buffer())(x).sum().backward()
    with pytest.raises(ValueError, match=r"returned 3 elements for bucket 0, whose gradients have 216"):
        wrapped_with(lambda *_: hooks.DeferredFuture(lambda: torch.ones(3)))(x).sum().backward()
    with pytest.raises(KeyError, match="mine"):
        wrapped_with(lambda *_: hooks.DeferredFuture(lambda: {}["mine"]))(x).sum().backward()
    several = [hooks.DeferredFuture(lambda: 1), hooks.DeferredFuture(lambda: 2).then(lambda done: done.value() * 2)]
    with pytest.raises(TypeError, match=r"several: paceline\.parallel\.hooks\.collect_all"):
        torch.futures.collect_all(several)
    assert not several[0].done()
    assert hooks.collect_all([*several, completed(3)]).then(lambda done: sum(done.value())).wait() == 8
    assert several[0].done()
    with pytest.raises(TypeError, match=r"state is a str; it must be a paceline\.ProcessGroup, or None"):
        hooks.allreduce_hook("world", dist.GradBucket(0, True, x, []))


def completed(value: int) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_hook_that_goes_wrong_is_told_apart(ranks):
    ranks(1)(hooks_that_go_wrong)


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
    """Trains a smaller model of examples/digits.py for three epochs; returns the accuracy on test images."""
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
    """Returns the accuracies by hook, all from one world."""
    return Ranks(2)(train_digits_with_every_hook)[0]


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind != "none"])
def test_training_with_a_hook_recognises_as_many_digits(ranks, kind):
    assert accuracies()[kind] >= accuracies()["none"] - 0.015
