"""Activation checkpointing in a wrapped module: the gradients are the average over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import batches, mlp, require_equal_on_all_ranks

import paceline as dist

OPTIONS = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-5, "overlap": True},  # one bucket per parameter, reduced during the backward pass
]


def x(rank: int, number: int = 0) -> torch.Tensor:
    return batches(4, 8, step=number)[rank].requires_grad_()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def whole(module: nn.Module, rank: int, reentrant: bool) -> None:
    loss_of(checkpoint(module, x(rank), use_reentrant=reentrant)).backward()


def with_more_behind_it(module: nn.Module, rank: int, reentrant: bool) -> None:
    checkpoint(lambda each: loss_of(module(each).tanh()), x(rank), use_reentrant=reentrant).backward()


def nested(module: nn.Module, rank: int, reentrant: bool) -> None:
    for inner in (reentrant, not reentrant):
        run = lambda each, inner=inner: checkpoint(module, each, use_reentrant=inner).tanh()  # noqa: E731
        loss_of(checkpoint(run, x(rank), use_reentrant=reentrant)).backward()


def twice_in_a_loss(module: nn.Module, rank: int, reentrant: bool) -> None:
    first, second = (checkpoint(module, x(rank, number), use_reentrant=reentrant) for number in range(2))
    loss_of(first.tanh() + second).backward()


def beside_a_plain_forward(module: nn.Module, rank: int, reentrant: bool) -> None:
    first, second = module(x(rank)), checkpoint(module, x(rank, 1), use_reentrant=reentrant)
    loss_of(first.tanh() + second).backward()


def before_and_after_a_plain_step(module: nn.Module, rank: int, reentrant: bool) -> None:
    whole(module, rank, reentrant)
    loss_of(module(x(rank, 1))).backward()
    whole(module, rank, reentrant)


def accumulated(module: nn.Module, rank: int, reentrant: bool) -> None:
    with module.no_sync() if isinstance(module, dist.DistributedDataParallel) else nullcontext():
        whole(module, rank, reentrant)
    with_more_behind_it(module, rank, reentrant)


def forward_outside_of_no_sync(module: nn.Module, rank: int, reentrant: bool) -> None:
    with module.no_sync() if isinstance(module, dist.DistributedDataParallel) else nullcontext():
        loss = loss_of(checkpoint(module, x(rank), use_reentrant=reentrant))
    loss.backward()
    whole(module, rank, reentrant)


def forward_without_gradients_inside(module: nn.Module, rank: int, reentrant: bool) -> None:
    def look(_: torch.Tensor) -> None:
        with torch.no_grad():
            module(x(rank, 2))

    output = checkpoint(module, x(rank), use_reentrant=reentrant)
    output.register_hook(look)
    loss_of(output).backward()


def a_backward_of_its_own_inside(module: nn.Module, rank: int, reentrant: bool) -> None:
    def train(_: torch.Tensor) -> None:
        with torch.enable_grad():
            whole(module, rank, reentrant)

    output = module(x(rank, 1))
    output.register_hook(train)
    loss_of(output).backward()


def of_a_retained_graph(module: nn.Module, rank: int, reentrant: bool) -> None:
    loss = loss_of(checkpoint(module, x(rank), use_reentrant=False))
    loss.backward(retain_graph=True)
    loss.backward()


def of_a_gradient_penalty(module: nn.Module, rank: int, reentrant: bool) -> None:
    inputs = x(rank)
    output = module(inputs) if reentrant else checkpoint(module, inputs, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (loss_of(output) + loss_of(gradient)).backward()


PROGRAMS = [
    whole,
    with_more_behind_it,
    nested,
    twice_in_a_loss,
    beside_a_plain_forward,
    before_and_after_a_plain_step,
    accumulated,
    forward_outside_of_no_sync,
    forward_without_gradients_inside,
    a_backward_of_its_own_inside,
    of_a_retained_graph,
    of_a_gradient_penalty,
]


def average_over_the_ranks(program: Callable[[nn.Module, int, bool], None], module: nn.Module, reentrant: bool) -> None:
    rank = dist.get_rank()
    expected = copy.deepcopy(module)
    program(expected, rank, reentrant)
    for param in expected.parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    for options in OPTIONS:
        wrapped = dist.DistributedDataParallel(copy.deepcopy(module), **options)
        told = f"{program.__name__}, use_reentrant={reentrant}, {options}"
        for _ in range(2):
            wrapped.zero_grad()
            program(wrapped, rank, reentrant)
            for param, wanted in zip(wrapped.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(param.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=lambda m: f"{told}: {m}")  # noqa: B023
        require_equal_on_all_ranks(param.grad for param in wrapped.parameters())


def whole_modules() -> None:
    dist.init_process_group()
    for program in PROGRAMS:
        for reentrant in (False, True):
            try:
                average_over_the_ranks(program, mlp(), reentrant)
            except Exception as error:
                raise AssertionError(f"{program.__name__} with use_reentrant={reentrant}") from error
    dist.destroy_process_group()


def test_a_checkpointed_wrapped_module_is_averaged(ranks):
    ranks(2)(whole_modules)


def recompute_with_buffers() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    wrapped = dist.DistributedDataParallel(copy.deepcopy(alone))
    for module in (alone, wrapped):
        whole(module, rank, False)
    torch.testing.assert_close(wrapped.module[1].running_mean, alone[1].running_mean)
    dist.destroy_process_group()


def test_a_recomputation_copies_no_buffers(ranks):
    ranks(2)(recompute_with_buffers)


def recompute_deterministically() -> None:
    dist.init_process_group()
    module = dist.DistributedDataParallel(mlp(), deterministic=True, logical_shards=2)
    with pytest.raises(RuntimeError, match=r"rank \d: .*inside a backward.*deterministic=True.*inside the module"):
        whole(module, dist.get_rank(), False)
    loss_of(module(x(dist.get_rank()))).backward()
    dist.destroy_process_group()


def test_a_deterministic_module_refuses_recomputation(ranks):
    ranks(2)(recompute_deterministically)
