"""Training over a PyTorch process group on an accelerator with delayed streams gives the CPU's results.

Paceline uses the process group of `fake_collectives` as it uses NCCL's. In `test_staged_channel`, `test_ddp_on_devices`
and `test_divided_training`, tensors are copied through host memory instead.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import fake_collectives
import fake_device
import pytest
import torch
from one_world import Program, merged, require, run_in_turn
from torch import nn
from world import Ranks

import paceline as dist
from paceline.train.ddp import hooks

pytestmark = pytest.mark.timeout(400)
Training = Callable[[str], Iterable[torch.Tensor]]


def on_both(train: Training) -> None:
    """Trains on the CPU and on the accelerator; the results must be equal."""
    expected = [each.detach().clone() for each in train("cpu")]
    with torch.fake.delays(seed=7, most_us=200):
        found = list(train("fake:0"))
        assert all(each.device.type == "fake" for each in found)
        found = [each.detach().cpu() for each in found]
    assert len(found) == len(expected)
    for at, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, other), (at, (mine - other).abs().max())


def close_on_both(train: Training) -> None:
    expected = [each.detach().clone() for each in train("cpu")]
    with torch.fake.delays(seed=7, most_us=200):
        found = [each.detach().cpu() for each in train("fake:0")]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Both devices use the single-tensor loop, because the foreach implementation rounds differently.
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def network(device: str) -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(device)


def batch(device: str, step: int = 0, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + (dist.get_rank() if rank is None else rank))
    images, labels = torch.randn(5, 1, 6, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    return images.to(device), labels.to(device)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 2) -> list[torch.Tensor]:
    for step in range(steps):
        images, labels = batch(device, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()]


def data_parallel(device: str) -> list[torch.Tensor]:
    model = dist.DistributedDataParallel(network(device), bucket_cap_mb=0.0005)
    with model.no_sync():
        model(batch(device, 9)[0]).square().mean().backward()
    model(batch(device, 8)[0]).square().mean().backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [*gradients, *trained(model, adamw(model.parameters()), device)]


def unused_parameters(device: str) -> list[torch.Tensor]:
    module = network(device)
    module.append(nn.Linear(3, 3).to(device))
    last = len(module) - 1

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module[:last](x)

    model = dist.DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    return trained(model, adamw(model.parameters()), device)


def hooked(hook: str, device: str) -> list[torch.Tensor]:
    # One bucket contains the whole network, because each bucket is approximated separately, and buckets on an
    # accelerator have different boundaries.
    model = dist.DistributedDataParallel(network(device))
    if hook == "power_sgd_hook":
        state: object = hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    else:
        state = None
    model.register_comm_hook(state, getattr(hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    return trained(model, optimizer, device, steps=4)


def synchronized_norms(device: str) -> list[torch.Tensor]:
    model = dist.convert_sync_batchnorm(network(device))  # in float64 on the CPU, and in float32 on an accelerator
    return trained(
        dist.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.05, foreach=False), device
    )


def model_on_two_devices() -> None:
    """The bucket of a layer on the second device is reduced once, although autograd has a thread per device."""

    class Halves(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).to(first)
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(second)
            self.devices = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x.to(self.devices[0]))
            return self.second(first.to(self.devices[1])).cpu() + first.mean(1, keepdim=True).cpu()

    def train(first: str, second: str) -> list[torch.Tensor]:
        model = dist.DistributedDataParallel(Halves(first, second), bucket_cap_mb=0.0002)
        optimizer = adamw(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).square().mean().backward()
            optimizer.step()
        return [each.detach().cpu() for each in model.parameters()]

    expected = train("cpu", "cpu")
    with torch.fake.delays(seed=3, most_us=500):
        assert all(map(torch.equal, train("fake:0", "fake:1"), expected))


def several_devices_a_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    devices = ["fake:0", "fake:1"]
    tensors = [torch.full((3,), 2.0 * rank + at, device=device) for at, device in enumerate(devices)]
    dist.all_reduce_multigpu(tensors)
    assert [each.tolist() for each in tensors] == [[float(sum(range(2 * size)))] * 3] * 2
    assert [str(each.device) for each in tensors] == devices
    inputs = [torch.full((3,), 2.0 * rank + at, device=device) for at, device in enumerate(devices)]
    outputs = [[torch.empty(3, device=device) for _ in range(2 * size)] for device in devices]
    dist.all_gather_multigpu(outputs, inputs)
    assert [[each[0].item() for each in one] for one in outputs] == [list(range(2 * size))] * 2


def mixed_precision() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        model = dist.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=256.0)
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device)
            optimizer.zero_grad()
            with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
                output = model(x)
            assert output.dtype is torch.bfloat16
            scaler.scale(output.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters())

    close_on_both(train)


def checkpoints() -> None:
    def state(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        model = network("fake:0")
        return {"model": model, "optimizer": adamw(model.parameters())}

    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    folder = Path(str(found[0]))
    saved = state(1)
    module = dist.DistributedDataParallel(saved["model"])
    with torch.fake.delays(seed=5, most_us=500):
        trained(module, saved["optimizer"], "fake:0")
        dist.save(saved, folder / "one", step=1)
        with dist.CheckpointManager(str(folder / "many"), every=1) as manager:
            manager.save(1, saved)
            expected = [each.detach().cpu() for each in saved["model"].parameters()]
            trained(module, saved["optimizer"], "fake:0")  # while the checkpoint is being written
            manager.save(2, saved)
            latest = [each.detach().cpu() for each in saved["model"].parameters()]
        loaded = state(2)
        dist.load(loaded, folder / "one")
        assert all(
            torch.equal(mine.cpu(), other) for mine, other in zip(loaded["model"].parameters(), expected, strict=True)
        )
        again = state(3)
        with dist.CheckpointManager(str(folder / "many"), every=1) as manager:
            assert manager.restore(again) == 2
        for mine, other in zip(again["model"].parameters(), latest, strict=True):
            assert mine.device.type == "fake" and torch.equal(mine.cpu(), other)


def calls_without_waiting() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    dist.all_reduce(torch.ones(1, device="fake:0"))  # this call connects the ranks
    calls = sum(fake_collectives.COLLECTIVES.values())
    with torch.fake.counted() as counts:
        x = torch.full((1000,), rank + 1.0, device="fake:0")
        dist.all_reduce(x)
        x += rank
        gathered = torch.empty(size * 1000, device="fake:0")
        work = dist.all_gather_into_tensor(gathered, x, async_op=True)
        work.wait()
        part = torch.empty(1000, device="fake:0")
        dist.reduce_scatter_tensor(part, gathered * (rank + 1))
    assert counts["synchronizations"] == 0
    assert sum(fake_collectives.COLLECTIVES.values()) - calls == 3
    assert gathered.view(size, -1)[:, 0].tolist() == [total + each for each in range(size)]
    assert part.tolist() == [(total + rank) * total] * 1000
    received = torch.empty(3, device="fake:0")
    works = [dist.isend(x[:3], (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert received.tolist() == [total + (rank - 1) % size] * 3


def late(run: Program) -> Program:
    return functools.partial(_run_late, run)


def _run_late(run: Program) -> None:
    with torch.fake.delays(seed=9, most_us=100):
        run()


def program(kind: Callable[[Training], None], train: Callable[..., list[torch.Tensor]], *arguments: object) -> Program:
    return functools.partial(kind, functools.partial(train, *arguments))


PROGRAMS: dict[str, Program] = {
    "calls_without_waiting": late(calls_without_waiting),
    "data_parallel": functools.partial(on_both, data_parallel),
    "unused_parameters": functools.partial(on_both, unused_parameters),
    "fp16_compress_hook": program(on_both, hooked, "fp16_compress_hook"),
    "power_sgd_hook": program(close_on_both, hooked, "power_sgd_hook"),
    "synchronized_norms": functools.partial(close_on_both, synchronized_norms),
    "model_on_two_devices": model_on_two_devices,
    "several_devices_a_rank": several_devices_a_rank,
    "mixed_precision": mixed_precision,
    "checkpoints": checkpoints,
}


def on_the_device() -> dict[str, str]:
    fake_collectives.register()
    torch.set_num_threads(1)
    dist.init_process_group(fake_collectives.NAME)
    return run_in_turn(PROGRAMS)


@functools.cache
def _reports() -> dict[str, str]:
    fake_device.build()
    return merged(Ranks(2)(on_the_device, timeout_s=110))


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_over_a_process_group_of_pytorch(name):
    require(_reports(), name)
