"""`torch.set_default_device` affects the user's tensors, but none of Paceline's own.

The default is the meta device, whose tensors have no values. Therefore, the test needs no GPU, and detects a message
that is created on this device by mistake.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from one_world import OneWorld
from torch import nn

import paceline as dist
from paceline.parallel.hooks import PowerSGDState, power_sgd_hook

CPU = torch.device("cpu")


def inputs() -> torch.Tensor:
    return torch.full((4, 8), dist.get_rank() + 1.0, device=CPU)


def model(*extra: nn.Module) -> nn.Sequential:
    """Returns a model on the CPU regardless of the default device, like a module that a user has moved there."""
    with CPU:
        torch.manual_seed(dist.get_rank())
        return nn.Sequential(nn.Linear(8, 64), *extra, nn.Linear(64, 2))


def trained(wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    torch.set_default_device("meta")
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(inputs()).sum().backward()
        optimizer.step()


def equal_on_all_ranks(module: nn.Module) -> None:
    mine = torch.cat([param.detach().flatten() for param in module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert mine.isfinite().all()
    assert all(theirs.equal(mine) for theirs in everyone)


def collectives() -> None:
    torch.set_default_device("meta")
    size = dist.get_world_size()
    total = inputs()
    dist.all_reduce(total)
    assert total[0, 0] == size * (size + 1) / 2
    rows = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]], device=CPU), torch.ones(2, 3, device=CPU), (4, 3), device=CPU, dtype=torch.float32
    )
    dist.all_reduce(rows)
    assert rows.to_dense()[2].tolist() == [size] * 3
    parts = [torch.full((2,), 1.0, device=CPU) for _ in range(size)] if dist.get_rank() == 0 else None
    assert dist.functional.scatter(parts, 0).tolist() == [1, 1]
    assert float(dist.mean_over_samples(6.0, 3)) == 2
    assert float(dist.mean_over_samples(torch.full((), 6.0, device=CPU), 3)) == 2
    dist.barrier()


def objects() -> None:
    torch.set_default_device("meta")
    mine = {"rank": dist.get_rank(), "values": inputs()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert [each["values"][0, 0].item() for each in everyone] == [rank + 1 for rank in range(len(everyone))]
    listed = [mine if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(listed, 0)
    assert listed[0]["rank"] == 0


def ddp(**options: Any) -> None:
    wrapped = dist.DistributedDataParallel(model(nn.BatchNorm1d(64, device=CPU)), **options)
    trained(wrapped, torch.optim.SGD(wrapped.parameters(), 0.01))
    equal_on_all_ranks(wrapped)


def ddp_with_unused_parameters() -> None:
    ddp(find_unused_parameters=True)


def deterministic_ddp() -> None:
    ddp(deterministic=True, logical_shards=4)


def power_sgd() -> None:
    wrapped = dist.DistributedDataParallel(model(nn.Linear(64, 64, device=CPU)))
    wrapped.register_comm_hook(PowerSGDState(start_powerSGD_iter=0), power_sgd_hook)
    trained(wrapped, torch.optim.SGD(wrapped.parameters(), 0.01))
    equal_on_all_ranks(wrapped)


def zero(stage: int) -> None:
    module = model(nn.Linear(64, 64, device=CPU))
    optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=stage, lr=0.01, momentum=0.9)
    trained(module, optimizer)
    optimizer.clip_grad_norm_(1.0)
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"].values()
        assert all(state["momentum_buffer"].is_cpu for state in states)
    with optimizer.full_parameters():
        equal_on_all_ranks(module)


def logical_shards() -> None:
    module = model(nn.Dropout(0.5))
    shards = dist.LogicalShards(module, 4)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    data = torch.arange(32.0, device=CPU).view(16, 2).repeat(1, 4)
    with CPU:  # torch's own loader draws its seed on the default device
        steps = [*dist.ShardLoader(data, batch_size=2, shards=shards)]
    torch.set_default_device("meta")
    for batches in steps:
        optimizer.zero_grad()
        loss = shards.backward(lambda x: module(x).square().mean(), batches)
        optimizer.step()
        assert loss.isfinite()
    equal_on_all_ranks(module)


def diloco() -> None:
    module = model()
    inner = torch.optim.SGD(module.parameters(), 0.01)
    outer = dist.LocalSGD(module, inner, every=1)
    torch.set_default_device("meta")
    for _ in range(2):
        inner.zero_grad()
        module(inputs()).sum().backward()
        inner.step()
        outer.step()
    outer.finish()
    equal_on_all_ranks(module)


def checkpoints() -> None:
    module = model()
    optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=2, lr=0.01, momentum=0.9)
    trained(module, optimizer)
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    assert found[0] is not None
    dist.save({"module": module, "optimizer": optimizer}, found[0])
    dist.load({"module": module, "optimizer": optimizer}, found[0])
    equal_on_all_ranks(module)


def samplers() -> None:
    torch.set_default_device("meta")
    sampler = dist.DistributedSampler(range(8), shuffle=True)
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, [*sampler])
    assert sorted(chain(*everyone)) == [*range(8)]


WORLD = OneWorld(
    collectives,
    objects,
    ddp,
    ddp_with_unused_parameters,
    deterministic_ddp,
    power_sgd,
    partial(zero, 1),
    partial(zero, 2),
    partial(zero, 3),
    logical_shards,
    diloco,
    checkpoints,
    samplers,
)


@pytest.mark.parametrize("name", WORLD.programs)
def test_the_default_device_is_the_users(name):
    WORLD.require(2, name)
