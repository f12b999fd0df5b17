"""Optimizers whose state is partitioned: closures, clipping, scaled losses, and rejected arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import paceline as dist

SGD = torch.optim.SGD


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))


def inputs(*shape: int) -> list[torch.Tensor]:
    """Returns the batches of all ranks."""
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]


def average_over(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Returns the gradients of data-parallel training, computed by one process."""
    for x in batches:
        (model(x).square().sum() / len(batches)).backward()


def require_same_parameters(sharded: dist.ZeroRedundancyOptimizer, model: nn.Module, reference: nn.Module) -> None:
    with sharded.full_parameters():
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def in_turn(case: Callable[..., None], arguments: Iterable[tuple[object, ...]]) -> None:
    dist.init_process_group()
    for each in arguments:
        case(*each)


def clip(stage: int) -> None:
    model, reference = mlp(), mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    batches = inputs(4, 8)
    for norm_type in (2.0, 1.0, float("inf")):
        sharded.zero_grad()
        reference.zero_grad()
        model(batches[dist.get_rank()]).square().sum().backward()
        average_over(reference, batches)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
        torch.testing.assert_close(sharded.clip_grad_norm_(0.5, norm_type), norm)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)


def test_gradients_are_clipped_by_their_norm_over_all_ranks(ranks):
    ranks(2)(in_turn, clip, [(1,), (2,), (3,)])


def clip_with_torch(stage: int) -> None:
    model = mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    x = inputs(4, 8)[dist.get_rank()]
    for clip in (lambda: None, lambda: sharded.clip_grad_norm_(0.5)):
        sharded.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
        clip()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sharded.step()
    model(x).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.warns(RuntimeWarning, match=r"each rank has clipped by another norm: call optimizer\.clip_grad_norm_"):
        sharded.step()


def test_clipping_with_torch_is_noticed_if_gradients_are_sharded(ranks):
    ranks(2)(in_turn, clip_with_torch, [(2,), (3,)])


def scaled(stage: int) -> None:
    """In the second step, half of the gradients overflow in a parameter that one rank owns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    reference = dist.DistributedDataParallel(copy.deepcopy(model))
    sharded = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    mine, theirs = (each("cpu", init_scale=8.0, growth_interval=2) for each in (dist.GradScaler, torch.amp.GradScaler))
    overflows = iter([False, False, True, True, False, False, False, False, False, False])
    for layer in (model[2], reference.module[2]):
        layer.weight.register_hook(lambda g: g * (torch.inf if next(overflows) and dist.get_rank() else 1))
    for step, x in enumerate(inputs(4, 8)[dist.get_rank()] * scale for scale in range(1, 6)):
        for each, its_optimizer, scaler in ((model, sharded, mine), (reference, optimizer, theirs)):
            its_optimizer.zero_grad()
            scaler.scale(each(x).square().sum()).backward()
            if step % 2:
                scaler.unscale_(its_optimizer)
                if its_optimizer is sharded:
                    norm = sharded.clip_grad_norm_(0.5)
                else:
                    torch.testing.assert_close(nn.utils.clip_grad_norm_(each.parameters(), 0.5), norm)
            scaler.step(its_optimizer)
            scaler.update()
        assert mine.get_scale() == theirs.get_scale()
    assert mine.get_scale() == 8.0  # 4 after the overflow, doubled after two more steps
    require_same_parameters(sharded, model, reference.module)

    if stage > 1:
        plain = torch.amp.GradScaler("cpu")
        plain.scale(torch.ones(()))
        with pytest.raises(TypeError, match=rf"rank \d: .* in stage {stage}, .*use paceline.GradScaler"):
            plain.step(sharded)  # after steps by a paceline.GradScaler


def test_losses_are_scaled_and_steps_skipped_on_all_ranks_alike(ranks):
    ranks(2)(in_turn, scaled, [(1,), (2,), (3,)])


def closures(stage: int) -> None:
    model, reference = mlp(), mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    optimizer = SGD(reference.parameters(), lr=0.1)
    batches = inputs(4, 8)

    def closure() -> torch.Tensor:
        sharded.zero_grad()
        loss = model(batches[dist.get_rank()]).square().sum()
        loss.backward()
        return loss

    average_over(reference, batches)
    with torch.no_grad():
        expected = reference(batches[dist.get_rank()]).square().sum()
        torch.testing.assert_close(sharded.step(closure), expected)
    optimizer.step()
    require_same_parameters(sharded, model, reference)


def test_a_closure_computes_the_gradients_of_the_step(ranks):
    ranks(2)(in_turn, closures, [(1,), (2,), (3,)])


def shard_what_cannot_be_sharded() -> None:
    dist.init_process_group()
    with pytest.raises(ValueError, match="stage is 4; it must be 1"):
        dist.ZeroRedundancyOptimizer(mlp(), SGD, stage=4, lr=0.1)
    with pytest.raises(ValueError, match="stage=3 .* needs the module"):
        dist.ZeroRedundancyOptimizer(mlp().parameters(), SGD, stage=3, lr=0.1)
    with pytest.raises(TypeError, match="LBFGS evaluates the loss several times"):
        dist.ZeroRedundancyOptimizer(mlp(), torch.optim.LBFGS)
    with pytest.raises(TypeError, match="momentun"):
        dist.ZeroRedundancyOptimizer(mlp(), SGD, lr=0.1, momentun=0.9)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and this optimizer has groups of \[6\]"):
        dist.ZeroRedundancyOptimizer(mlp(), SGD, lr=0.1).load_state_dict(SGD(mlp()[0].parameters()).state_dict())
    width = 8 + dist.get_rank()
    with pytest.raises(dist.CollectiveMismatchError, match=r"models differ: .*'weight' of shape \[8, 8\]"):
        dist.ZeroRedundancyOptimizer(nn.Linear(width, 8), SGD, lr=0.1)
    with pytest.raises(dist.CollectiveMismatchError, match="rank 0: stage=1; rank 1: stage=2"):
        dist.ZeroRedundancyOptimizer(mlp(), SGD, stage=1 + dist.get_rank(), lr=0.1)


def test_what_cannot_be_sharded_is_refused_with_the_reason(ranks):
    ranks(2)(shard_what_cannot_be_sharded)
