"""A second backward pass after one forward pass averages the new gradients if the old ones were cleared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_world import OneWorld
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch_programs import torch_group
from training import average_gradients, batches, gradients, mlp, require_equal_on_all_ranks, require_gradients

import paceline as dist

TINY_BUCKETS = {"bucket_cap_mb": 1e-5, "overlap": True}


class Heads(nn.Module):
    """A network with two outputs, which share a trunk and have one separate layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()  # mlp() sets the seed
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.left(h).sum(), self.right(h).sum()


def repeat_the_left(wrap: Callable[[nn.Module], nn.Module], rank: int, data: list[torch.Tensor]) -> nn.Module:
    """Returns the module after a backward pass through both heads and another through the left head alone."""
    module = Heads()
    left, right = wrap(module)(data[rank])
    (left + right).backward(retain_graph=True)
    module.zero_grad()
    left.backward()
    return module


def torch_leaves_its_gradients_local(directory: str) -> None:
    with torch_group("gloo", directory):
        rank = torch.distributed.get_rank()
        data = [torch.full((4, 8), 1.0 + each) for each in range(2)]
        module = repeat_the_left(TorchDdp, rank, data)
        alone = Heads()
        alone(data[rank])[0].backward()
        for mine, own in zip(gradients(module), gradients(alone), strict=True):
            torch.testing.assert_close(mine, own)


def test_torch_leaves_a_repeated_backward_unaveraged(ranks, tmp_path):
    ranks(2)(torch_leaves_its_gradients_local, str(tmp_path))


def averages_the_gradients_that_it_computes() -> None:
    data = batches(4, 8)
    for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}, {"static_graph": True}):
        module = repeat_the_left(lambda m, o=options: dist.DistributedDataParallel(m, **o), dist.get_rank(), data)
        assert module.right.weight.grad is None
        require_gradients(module, average_gradients(Heads(), lambda m: [m(x)[0] for x in data]))
        require_equal_on_all_ranks(gradients(module))


def averages_what_only_one_rank_computes() -> None:
    data, rank = batches(4, 8), dist.get_rank()
    module = Heads()
    outputs = dist.DistributedDataParallel(module)(data[rank])
    sum(outputs).backward(retain_graph=True)
    module.zero_grad()
    outputs[rank].backward()
    require_gradients(module, average_gradients(Heads(), lambda m: [m(x)[r] for r, x in enumerate(data)]))


def averages_all_gradients_in_the_next_step() -> None:
    data, rank = batches(4, 8), dist.get_rank()
    module = Heads()
    wrapped = dist.DistributedDataParallel(module, **TINY_BUCKETS)
    left, right = wrapped(data[rank])
    (left + right).backward(retain_graph=True)
    module.zero_grad()
    right.backward()
    module.zero_grad()
    sum(wrapped(data[rank])).backward()
    require_gradients(module, average_gradients(Heads(), lambda m: [sum(m(x)) for x in data]))


def lets_one_rank_differentiate_inputs_alone() -> None:
    data, rank = batches(4, 8), dist.get_rank()
    module = Heads()
    x = data[rank].requires_grad_()
    left, right = dist.DistributedDataParallel(module)(x)
    (left + right).backward(retain_graph=True)
    module.zero_grad()
    if rank == 0:
        (slope,) = torch.autograd.grad(left, x)
        assert slope.shape == x.shape
    assert not gradients(module)
    dist.barrier()


def raises_on_both_ranks_where_only_one_leaves_gradients_out() -> None:
    data, rank = batches(4, 8), dist.get_rank()
    module = Heads()
    left, right = dist.DistributedDataParallel(module)(data[rank])
    (left + right).backward(retain_graph=True)
    module.zero_grad()
    with pytest.raises(dist.CollectiveMismatchError, match="This call averages the gradients of Heads"):
        (left + right if rank == 0 else left).backward()


WORLD = OneWorld(
    averages_the_gradients_that_it_computes,
    averages_what_only_one_rank_computes,
    averages_all_gradients_in_the_next_step,
    lets_one_rank_differentiate_inputs_alone,
    raises_on_both_ranks_where_only_one_leaves_gradients_out,
)


@pytest.mark.parametrize("program", WORLD.programs)
def test_a_repeated_backward(program):
    WORLD.require(2, program)
