"""A forward pass without a backward pass does not cause averaging in backward passes under `no_sync`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_world import OneWorld
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint
from torch_programs import torch_group
from training import average_gradients, batches, gradients, mlp, require_equal_on_all_ranks, require_gradients

import paceline as dist


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward pass, with a nested backward pass if reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=True)


def backward_without_sync(wrapped: nn.Module, x: torch.Tensor) -> None:
    with wrapped.no_sync():
        wrapped(x).sum().backward()


def torch_averages_it(directory: str) -> None:
    with torch_group("gloo", directory):
        rank = torch.distributed.get_rank()
        data = [torch.full((4, 8), 1.0 + each) for each in range(2)]
        module = mlp()
        wrapped = TorchDdp(module)
        wrapped(data[rank])
        backward_without_sync(wrapped, data[rank])
        mean = mlp()
        (sum(mean(x).sum() for x in data) / 2).backward()
        for mine, averaged in zip(gradients(module), gradients(mean), strict=True):
            torch.testing.assert_close(mine, averaged)


def test_torch_averages_under_no_sync_after_a_lone_forward(ranks, tmp_path):
    ranks(2)(torch_averages_it, str(tmp_path))


def require_own_then_average(make: Callable[[], nn.Module], run: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """Asserts that `run` does not average gradients, and that the next backward pass averages the accumulated ones."""
    data, more = batches(4, 8), batches(4, 8, step=1)
    data, more = ([x.requires_grad_() for x in each] for each in (data, more))
    module, rank = make(), dist.get_rank()
    wrapped = dist.DistributedDataParallel(module)
    run(wrapped, data[rank])
    own = make()
    own(data[rank]).sum().backward()
    for mine, expected in zip(gradients(module), gradients(own), strict=True):
        torch.testing.assert_close(mine, expected)
    wrapped(more[rank]).sum().backward()
    both = zip(data, more, strict=True)
    require_gradients(module, average_gradients(make(), lambda m: [m(x).sum() + m(y).sum() for x, y in both]))
    require_equal_on_all_ranks(gradients(module))


def after_the_lone_forward() -> None:
    def run(wrapped: nn.Module, x: torch.Tensor) -> None:
        wrapped(x)
        backward_without_sync(wrapped, x)

    require_own_then_average(mlp, run)


def on_one_rank_alone() -> None:
    def run(wrapped: nn.Module, x: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            wrapped(x)
        backward_without_sync(wrapped, x)

    require_own_then_average(mlp, run)


def before_the_lone_forward() -> None:
    def run(wrapped: nn.Module, x: torch.Tensor) -> None:
        with wrapped.no_sync():
            output = wrapped(x)
        wrapped(x)
        output.sum().backward()

    require_own_then_average(mlp, run)


def with_a_backward_within_the_backward() -> None:
    def run(wrapped: nn.Module, x: torch.Tensor) -> None:
        wrapped(x)
        backward_without_sync(wrapped, x)

    require_own_then_average(Checkpointed, run)


def a_backward_of_both_averages() -> None:
    data, rank = batches(4, 8), dist.get_rank()
    module = mlp()
    wrapped = dist.DistributedDataParallel(module)
    output = wrapped(data[rank])
    with wrapped.no_sync():
        other = wrapped(data[rank])
    (output + other).sum().backward()
    require_gradients(module, average_gradients(mlp(), lambda m: [2 * m(x).sum() for x in data]))


WORLD = OneWorld(
    after_the_lone_forward,
    on_one_rank_alone,
    before_the_lone_forward,
    with_a_backward_within_the_backward,
    a_backward_of_both_averages,
)


@pytest.mark.parametrize("program", WORLD.programs)
def test_a_backward_under_no_sync(program):
    WORLD.require(2, program)
