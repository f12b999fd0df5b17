"""Optimizers that step within backward, with averaged gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training import batches, gradients, mlp

import paceline as dist

TINY_BUCKETS = {"bucket_cap_mb": 0.0003, "overlap": True}


def step_in_backward() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}):
        reference = mlp()
        module = copy.deepcopy(reference)
        dist.apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.01})
        wrapped = dist.DistributedDataParallel(module, **options)
        ordinary = dist.DistributedDataParallel(reference, **options)
        optimizer = torch.optim.Adam(ordinary.parameters(), lr=0.01)
        for step in range(5):
            x = batches(4, 8, step=step)[rank]
            with wrapped.no_sync():
                wrapped(x + 1).square().mean().backward()
            wrapped(x).square().mean().backward()
            assert gradients(module) == []
            optimizer.zero_grad()
            with ordinary.no_sync():
                ordinary(x + 1).square().mean().backward()
            ordinary(x).square().mean().backward()
            optimizer.step()
        for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_optimizers_in_backward_step_with_averaged_gradients(ranks):
    ranks(2)(step_in_backward)


def fused_by_others() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    dist.init_process_group()
    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(TypeError, match=r"'0\.weight' has an optimizer in backward.*paceline\.apply_optimizer_in_back"):
        dist.DistributedDataParallel(module)
    alone = nn.Linear(2, 2)
    dist.apply_optimizer_in_backward(torch.optim.SGD, alone.parameters(), {"lr": 1.0})
    before = alone.bias.detach().clone()
    alone(torch.ones(1, 2)).sum().backward()  # not wrapped
    assert alone.bias.grad is None
    torch.testing.assert_close(alone.bias.detach(), before - 1)
    with pytest.raises(ValueError, match=r"shape \[2, 2\] has an optimizer in backward already"):
        dist.apply_optimizer_in_backward(torch.optim.SGD, alone.parameters())


def test_optimizers_that_would_step_too_early_are_refused(ranks):
    ranks(1)(fused_by_others)
