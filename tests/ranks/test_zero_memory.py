"""ZeroRedundancyOptimizer with gradients and parameters that share memory, or are of several types."""

from __future__ import annotations

import copy

import torch
from torch import nn

import paceline as dist


class Plus(nn.Module):
    """With one sample, the gradient of `x` shares memory with the parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.term = nn.Parameter(torch.randn(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.term.unsqueeze(0)


class Mixed(nn.Module):
    """Layers of two types, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double(), nn.Linear(64, 64))
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x).double()).float())


def require_unsharded_steps(model: nn.Module, stage: int, overlap: bool) -> None:
    reference = copy.deepcopy(model)
    options = {"lr": 1e-3, "momentum": 0.9}
    sharded = dist.ZeroRedundancyOptimizer(
        model, torch.optim.SGD, stage=stage, overlap=overlap, bucket_cap_mb=0.001, **options
    )
    optimizer = torch.optim.SGD(reference.parameters(), **options)
    size = dist.get_world_size()
    batches = [torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for _ in range(3):
        sharded.zero_grad()
        optimizer.zero_grad()
        model(batches[dist.get_rank()]).square().sum().backward()
        for x in batches:
            (reference(x).square().sum() / size).backward()
        sharded.step()
        optimizer.step()
    with sharded.full_parameters():
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def run_on_each_stage(kind: str) -> None:
    dist.init_process_group()
    for stage in (1, 2, 3):
        for overlap in (False, True):
            torch.manual_seed(0)
            if kind == "plus":
                model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Plus())
            elif kind == "wide convolution":
                layers = [nn.Unflatten(2, (8, 8)), nn.Conv2d(16, 40, 3), nn.Conv2d(40, 2, 3)]
                model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
            else:
                model = Mixed()
            require_unsharded_steps(model, stage, overlap)


def test_a_gradient_that_other_layers_still_read_is_not_changed(ranks):
    ranks(2)(run_on_each_stage, "plus")


def test_parameters_of_several_types_and_frozen_ones_are_shared(ranks):
    ranks(2)(run_on_each_stage, "mixed")


def test_a_parameter_is_cut_as_it_lies_in_memory(ranks):
    ranks(2)(run_on_each_stage, "wide convolution")


def keep_a_view() -> None:
    dist.init_process_group()
    whole = torch.randn(2, 64, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer, part in zip(model, whole, strict=True):
        layer.weight.data = part
    require_unsharded_steps(model, 3, False)


def test_parameters_that_lie_in_one_memory_are_parted(ranks):
    ranks(2)(keep_a_view)


def freeze_the_most() -> list[int]:
    """Returns the number of parameters on a rank before each layer's backward pass, last layer first."""
    dist.init_process_group()
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(6)))
    dist.ZeroRedundancyOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
    held: list[int] = []
    x = torch.ones(1, 8)
    for layer in model:
        x = layer(x)
        x.register_hook(lambda _: held.append(sum(param.numel() for param in model[1:].parameters())))
    x.sum().backward()
    return held


def test_frozen_layers_are_freed_after_their_backward(ranks):
    for held in ranks(2)(freeze_the_most):
        assert max(held) <= 64 * (3 + 1)
