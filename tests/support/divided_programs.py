"""Programs that check that sharded optimizers and models train on devices as they do on the CPU.

`use` selects the device type. Each rank has a device of its own if there are enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from one_world import Program
from torch import nn

import paceline as dist
from paceline.parallel.hooks import PowerSGDState, power_sgd_hook

Result = tuple[list[float], list[torch.Tensor]]


_device_type = "cpu"
_tolerance = {"rtol": 1e-5, "atol": 1e-6}


def use(device_type: str, **tolerance: float) -> None:
    """Selects the device type for programs in this process, and the tolerance for comparisons with the CPU."""
    global _device_type
    _device_type = device_type
    _tolerance.update(tolerance)


def own_device() -> str:
    return f"{_device_type}:{dist.get_rank() % torch.get_device_module(_device_type).device_count()}"


def network(dropout: float = 0.0) -> nn.Sequential:
    with torch.device("cpu"):  # the same numbers on all devices
        torch.manual_seed(3)
        # The gradient of a bias before the normalization would consist of rounding errors, which Adam would amplify.
        first = nn.Linear(8, 40, bias=False)
        layers = [first, nn.BatchNorm1d(40), nn.Dropout(dropout), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)]
        return nn.Sequential(*layers)


def batch(step: int, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(6, 8, generator=generator, device="cpu")
    targets = torch.randint(0, 4, (6,), generator=generator, device="cpu")
    return inputs.to(device), targets.to(device)


def trained(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, before_step: Callable[[], object] = lambda: None
) -> list[float]:
    losses = []
    for step in range(3):
        inputs, targets = batch(step, device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in (*module.parameters(), *module.buffers())]


def require_close(on_device: Result, on_cpu: Result) -> None:
    """Compares up to rounding errors, because the summation order in a matrix product depends on memory addresses."""
    torch.testing.assert_close(on_device, on_cpu, **_tolerance)


def zero(stage: int, **options: object) -> None:
    def train(device: str, **options: object) -> tuple[Result, dict[str, object] | None]:
        module = network().to(device)
        optimizer = dist.ZeroRedundancyOptimizer(
            module, torch.optim.AdamW, stage=stage, bucket_cap_mb=0.004, lr=0.01, foreach=False, **options
        )
        losses = trained(module, optimizer, device, lambda: optimizer.clip_grad_norm_(0.5))
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict() if dist.get_rank() == 0 else None
        everyones = [state]
        dist.broadcast_object_list(everyones, 0)
        optimizer.load_state_dict(everyones[0])
        losses += trained(module, optimizer, device)
        with optimizer.full_parameters():
            return (losses, values(module)), state

    expected, expected_state = train("cpu")
    found, state = train(own_device(), **options)
    require_close(found, expected)
    if state is not None:
        assert all(value.is_cpu for of_param in state["state"].values() for value in of_param.values())
        torch.testing.assert_close(state["state"], expected_state["state"], **_tolerance)


def zero_overlapped(stage: int) -> None:
    zero(stage, overlap=True)


def zero_offloaded(stage: int) -> None:
    zero(stage, offload="cpu")


def zero_with_a_default_device(stage: int) -> None:
    """Runs with a default device, which torch uses for tensors that are created without an explicit device."""
    with torch.device(own_device()):
        zero(stage)


def a_zero_optimizer_has_parameters_on_two_devices(stage: int) -> None:
    class Halves(nn.Module):
        def __init__(self, devices: tuple[str, str]) -> None:
            super().__init__()
            whole = network()
            self.first, self.second = whole[:3].to(devices[0]), whole[3:].to(devices[1])
            self.devices = devices

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(inputs).to(self.devices[1])).to(self.devices[0])

    group = dist.new_group()  # the default group connects each rank's own device
    results = []
    for devices in (("cpu", "cpu"), (f"{_device_type}:0", f"{_device_type}:1")):
        module = Halves(devices)
        optimizer = dist.ZeroRedundancyOptimizer(
            module, torch.optim.AdamW, group, stage=stage, bucket_cap_mb=0.004, lr=0.01, foreach=False
        )
        losses = trained(module, optimizer, devices[0], functools.partial(optimizer.clip_grad_norm_, 0.5))
        results.append((losses, values(module)))
    require_close(results[1], results[0])
    with pytest.raises(ValueError, match=r"rank \d: stage=3 got a module with parameters on \w+:0 and \w+:1.*stage=2"):
        dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, group, stage=3, lr=0.1)


def a_rank_without_gradients_joins_the_norm() -> None:
    """One rank owns the model's single parameter; the other ranks have no gradients."""
    module = nn.Linear(1, 1, bias=False).to(own_device())
    optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=2, lr=0.1)
    module(torch.full((1, 1), 3.0, device=own_device())).sum().backward()
    assert optimizer.clip_grad_norm_(1.0).item() == 3


def unused_and_channels_last_parameters_are_averaged(stage: int) -> None:
    results = []
    for device in ("cpu", own_device()):
        torch.manual_seed(0)
        used = nn.Conv2d(2, 3, 3).to(device, memory_format=torch.channels_last)
        others = nn.ModuleList([nn.Linear(2, 2) for _ in range(dist.get_world_size())]).to(device)
        module = nn.ModuleDict({"used": used, "others": others})
        optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=stage, lr=0.1)
        loss = used(torch.ones(1, 2, 4, 4, device=device)).sum()
        loss = loss + others[dist.get_rank()](torch.ones(1, 2, device=device)).sum()
        loss.backward()
        optimizer.step()
        results.append(([loss.item()], values(module)))
    require_close(results[1], results[0])


def logical_shards() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def train(device: str, group: dist.ProcessGroup | None = None) -> Result:
        module = network().to(device)
        shards = dist.LogicalShards(module, 4, process_group=group)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
        data = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
        losses = []
        for batches in dist.ShardLoader(data, batch_size=3, shards=shards):
            optimizer.zero_grad()
            loss = shards.backward(lambda x: module(x.to(device)).square().mean(), batches)
            assert loss.device == torch.device(device)
            optimizer.step()
            losses.append(loss.item())
        count = shards.evaluate(
            lambda x: (x.to(device) > 0).sum(), dist.ShardLoader(data, 3, shards=shards, shuffle=False)
        )
        return [*losses, count.item()], values(module)

    together = train(own_device())
    require_close(together, train("cpu"))
    torch.testing.assert_close(together, train(own_device(), alone), rtol=0, atol=0)


def dropout_of_shards_draws_from_the_devices_generator() -> None:
    """A shard has the same masks on any rank, and the device's own random stream is not changed."""
    device = torch.device(own_device())
    module = nn.Dropout(0.5).to(device)
    module.register_buffer("here", torch.zeros(1, device=device))
    shards = dist.LogicalShards(nn.Sequential(module, nn.Linear(1, 1).to(device)), 2, seed=7)
    masks: list[torch.Tensor] = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        masks.append(module(torch.ones(64, 1, device=device)).cpu())
        return shards.module[1](x.to(device)).sum()

    generators = torch.get_device_module(device)
    before = generators.get_rng_state(device)
    for _ in range(2):
        for batches in dist.ShardLoader(torch.ones(2, 1), batch_size=1, shards=shards, shuffle=False):
            shards.backward(loss_of, [type(b)((0, 0, b.key[2]), b.weight, b.data) for b in batches])
    assert torch.equal(masks[0], masks[1]) and 0 < masks[0].count_nonzero() < 64
    assert torch.equal(generators.get_rng_state(device), before)
    everyones = [torch.empty_like(masks[0]) for _ in range(2)]
    dist.all_gather(everyones, masks[0])
    assert not torch.equal(*everyones)  # different shards


def deterministic_ddp() -> None:
    def train(device: str) -> Result:
        module = dist.DistributedDataParallel(network().to(device), deterministic=True, logical_shards=4)
        assert module(batch(0, device)[0]).device == torch.device(device)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
        return trained(module, optimizer, device), values(module)

    require_close(train(own_device()), train("cpu"))


def power_sgd() -> None:
    def train(device: str) -> Result:
        module = dist.DistributedDataParallel(network().to(device))
        module.register_comm_hook(PowerSGDState(start_powerSGD_iter=0), power_sgd_hook)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
        return trained(module, optimizer, device), values(module)

    require_close(train(own_device()), train("cpu"))


def pipeline_of_32_micro_batches() -> None:
    results = []
    for device in ("cpu", own_device()):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
        pipeline = dist.Pipeline(layers, lambda output, target: (output - target).square().mean(), micro_batches=32)
        optimizer = torch.optim.SGD(pipeline.parameters(), 0.1, foreach=False)
        generator = torch.Generator().manual_seed(1)
        inputs, targets = torch.randn(64, 4, generator=generator), torch.randn(64, 2, generator=generator)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = pipeline.step(inputs.to(device), targets.to(device))
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, values(pipeline)))
    require_close(results[1], results[0])


def local_sgd() -> None:
    def train(device: str) -> Result:
        module = network().to(device)
        inner = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
        outer = dist.LocalSGD(module, inner, every=2)
        losses = []
        for step in range(4):
            inputs, targets = batch(step, device)
            inner.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs), targets)
            loss.backward()
            inner.step()
            outer.step()
            losses.append(loss.item())
        outer.finish()
        return losses, values(module)

    require_close(train(own_device()), train("cpu"))


def uneven_inputs_within_join() -> None:
    def train(device: str) -> Result:
        module = network().to(device)
        optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=2, lr=0.1, foreach=False)
        with dist.Join([optimizer]):
            for step in range(2 + dist.get_rank()):
                inputs, targets = batch(step, device)
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(inputs), targets).backward()
                optimizer.step()
        return [], values(module)

    require_close(train(own_device()), train("cpu"))


def tensor_parallel() -> None:
    def train(device: str) -> Result:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        dist.parallelize_module(module, None, {"0": dist.ColwiseParallel(), "2": dist.RowwiseParallel()})
        optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(device)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            module(inputs).square().sum().backward()
            norms.append(dist.clip_grad_norm_(module.parameters(), 1.0).item())
            optimizer.step()
        return norms, values(module)

    require_close(train(own_device()), train("cpu"))


ON_TWO_DEVICES: tuple[Program, ...] = tuple(
    functools.partial(a_zero_optimizer_has_parameters_on_two_devices, stage) for stage in (1, 2)
)

PROGRAMS: tuple[Program, ...] = (
    *(functools.partial(zero, stage) for stage in (1, 2, 3)),
    *(functools.partial(zero_overlapped, stage) for stage in (2, 3)),
    *(functools.partial(zero_offloaded, stage) for stage in (1, 2)),
    *(functools.partial(zero_with_a_default_device, stage) for stage in (1, 3)),
    a_rank_without_gradients_joins_the_norm,
    *(functools.partial(unused_and_channels_last_parameters_are_averaged, stage) for stage in (1, 2)),
    logical_shards,
    dropout_of_shards_draws_from_the_devices_generator,
    deterministic_ddp,
    power_sgd,
    pipeline_of_32_micro_batches,
    local_sgd,
    uneven_inputs_within_join,
    tensor_parallel,
)
