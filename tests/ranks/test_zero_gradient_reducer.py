"""ZeroRedundancyOptimizer in unusual cases: it returns the correct result or raises an error that explains
why it cannot."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def accumulate(stage: int, set_to_none: bool) -> None:
    model, reference = mlp(), mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1, momentum=0.9)
    optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9)
    batches = inputs(4, 8)
    for _ in range(2):
        sharded.zero_grad(set_to_none)
        optimizer.zero_grad(set_to_none)
        for scale in (1, 2, 3):
            model(scale * batches[dist.get_rank()]).square().sum().backward()
            average_over(reference, [scale * x for x in batches])
        sharded.step()
        optimizer.step()
    require_same_parameters(sharded, model, reference)


def test_several_backwards_accumulate(ranks):
    ranks(2)(in_turn, accumulate, list(itertools.product([1, 2, 3], [True, False])))


class Choosy(nn.Module):
    """Rank 0 skips the second layer, rank 1 skips the third, and all ranks skip the fourth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.fourth = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.third if x.shape[0] == 4 else self.second)(x)


def leave_out(stage: int) -> None:
    model, reference = Choosy(), Choosy()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    optimizer = SGD(reference.parameters(), lr=0.1)
    batches = [torch.ones(4, 8), torch.ones(5, 8)]
    for _ in range(2):
        sharded.zero_grad()
        optimizer.zero_grad()
        model(batches[dist.get_rank()]).square().sum().backward()
        average_over(reference, batches)
        assert model.fourth.weight.grad is None
        sharded.step()
        optimizer.step()
    require_same_parameters(sharded, model, reference)


def test_a_parameter_is_averaged_if_any_rank_used_it(ranks):
    ranks(2)(in_turn, leave_out, [(1,), (2,), (3,)])


class Pair(nn.Module):
    """Two parameters of equal size, so that each of two ranks owns one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[dist.get_rank()](x)


def go_apart() -> None:
    dist.init_process_group()
    model = Apart()
    dist.ZeroRedundancyOptimizer(model, SGD, stage=3, lr=0.1)
    with pytest.raises(dist.CollectiveMismatchError, match=r"runs layer 'layers\..' while rank . runs 'layers\..'"):
        model(torch.ones(1, 8))


def test_ranks_that_run_different_layers_are_told_both(ranks):
    ranks(2)(go_apart)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.last = mlp(), nn.Linear(8, 2)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self._reentrant)
        return self.last(x)


def checkpointed(stage: int) -> None:
    model = Checkpointed(reentrant=False)
    reference = copy.deepcopy(model)
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    optimizer = SGD(reference.parameters(), lr=0.1)
    batches = inputs(4, 8)
    for _ in range(3):
        sharded.zero_grad()
        optimizer.zero_grad()
        model(batches[dist.get_rank()]).square().sum().backward()
        average_over(reference, batches)
        sharded.step()
        optimizer.step()
    require_same_parameters(sharded, model, reference)

    model = Checkpointed(reentrant=True)
    dist.ZeroRedundancyOptimizer(model, SGD, stage=stage, lr=0.1)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(batches[0].clone().requires_grad_()).sum().backward()


def test_checkpointed_layers_are_averaged_or_the_fix_is_named(ranks):
    ranks(2)(in_turn, checkpointed, [(2,), (3,)])


def under_a_wrapper_it_does_not_know() -> None:
    dist.init_process_group()
    wrapped, reference = dist.DistributedDataParallel(mlp()), mlp()
    sharded = dist.ZeroRedundancyOptimizer(wrapped.parameters(), SGD, stage=2, lr=0.1)
    optimizer = SGD(reference.parameters(), lr=0.1)
    batches = inputs(4, 8)
    with wrapped.no_sync():
        wrapped(batches[dist.get_rank()]).square().sum().backward()
    wrapped(2 * batches[dist.get_rank()]).square().sum().backward()
    average_over(reference, [*batches])
    average_over(reference, [2 * x for x in batches])
    sharded.step()
    optimizer.step()
    require_same_parameters(sharded, wrapped.module, reference)
    assert sum(param.grad is not None for param in wrapped.parameters()) < 6


def test_stage_two_keeps_gradients_that_the_wrapper_averages(ranks):
    ranks(2)(under_a_wrapper_it_does_not_know)


def save_and_evaluate() -> None:
    dist.init_process_group()
    model, reference = mlp(), mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=3, lr=0.1)
    x = torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x))
    with sharded.full_parameters():
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
        model.load_state_dict({name: value + 1 for name, value in reference.state_dict().items()})
        reference.load_state_dict(model.state_dict())
    assert any(param.numel() == 0 for param in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x))


def test_a_module_in_parts_is_evaluated_saved_and_loaded(ranks):
    ranks(2)(save_and_evaluate)


def recover_from_a_failed_backward() -> None:
    dist.init_process_group()
    model, reference = mlp(), mlp()
    sharded = dist.ZeroRedundancyOptimizer(model, SGD, stage=2, lr=0.1)
    x = inputs(4, 8)[dist.get_rank()]
    fails = iter([True, False])

    def fail_once(_: torch.Tensor) -> None:
        if next(fails):
            raise ArithmeticError

    model[0].weight.register_hook(fail_once)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    sharded.zero_grad()
    model(x).square().sum().backward()
    sharded.step()
    average_over(reference, inputs(4, 8))
    SGD(reference.parameters(), lr=0.1).step()
    require_same_parameters(sharded, model, reference)


def test_zero_grad_clears_up_after_a_backward_that_failed(ranks):
    ranks(2)(recover_from_a_failed_backward)
