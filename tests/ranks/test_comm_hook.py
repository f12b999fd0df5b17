"""Communication hooks: their arguments and futures, and convergence of training that uses them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import average_gradients, batches, gradients, mlp, require_gradients

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
