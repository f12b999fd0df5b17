"""Compares sharded training on a device with training in one CPU process, and tests calls with several tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import rnn

import paceline as dist
from gpu_cases.session import Session, Setting, session
from gpu_cases.training import CLASSES, STEPS, Network, batch, largest_difference

SHARDS = 4
MICRO_BATCHES = 8


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    )


def _whole_losses(model: nn.Module, ranks: int, rows: int = 16) -> list[float]:
    """Returns the losses of a single CPU process that trains on the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    told = []
    for step in range(STEPS):
        parts = [batch(step, rank, rows) for rank in range(ranks)]
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


def pipeline(setting: Setting, schedule: str) -> dict[str, object]:
    """Trains layers that are divided among the ranks."""
    with session(setting, theirs=False) as here:
        stages = 2 if schedule == "interleaved" else 1
        divided = dist.Pipeline(
            _layers().to(here.device),
            nn.functional.cross_entropy,
            micro_batches=MICRO_BATCHES,
            schedule=schedule,
            stages_per_rank=stages,
        )
        optimizer = torch.optim.SGD(divided.parameters(), 0.05)
        found = []
        for step in range(STEPS):
            inputs, targets = (each.to(here.device) for each in batch(step, 0))
            optimizer.zero_grad()
            loss = divided.step(inputs if divided.is_first else None, targets if divided.is_last else None)
            optimizer.step()
            found.append(float(loss))
        return _compared(here, schedule, found, _whole_losses(_layers(), 1))


def tensor_parallel(setting: Setting) -> dict[str, object]:
    """Trains two linear layers; each rank has some of their columns or rows."""
    with session(setting, theirs=False) as here:
        model = _layers().to(here.device)
        mesh = dist.init_device_mesh("cuda" if here.device.type == "cuda" else "cpu", (here.size,))
        dist.parallelize_module(model, mesh, {"1": dist.ColwiseParallel(), "3": dist.RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        found = []
        for step in range(STEPS):
            inputs, targets = (each.to(here.device) for each in batch(step, 0))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return _compared(here, "tensor parallel", found, _whole_losses(_layers(), 1))


def _compared(here: Session, label: str, found: list[float], wanted: list[float]) -> dict[str, object]:
    return {"largest difference": largest_difference(f"rank {here.rank}: {label}", found, wanted, 1e-4)}


def logical_shards(setting: Setting) -> dict[str, object]:
    """Trains with LogicalShards on all ranks and then on one rank; the parameters must be bitwise equal."""
    with session(setting, theirs=False) as here:
        alone = [dist.new_group([rank]) for rank in range(here.size)][here.rank]
        ends = [_sharded(here, group) for group in (None, alone)]
        differs = [name for name, one in ends[0].items() if not torch.equal(one.cpu(), ends[1][name].cpu())]
        if differs:
            raise AssertionError(f"rank {here.rank}: {', '.join(differs)} differ between {here.size} ranks and one")
        return {"tensors": len(ends[0])}


def _sharded(here: Session, group: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Network().to(here.device)
    shards = dist.LogicalShards(model, SHARDS, seed=0, process_group=group)
    inputs, targets = batch(0, 0, 64)
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = dist.ShardLoader(data, batch_size=4, shards=shards)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batches in loader:
        optimizer.zero_grad()
        shards.backward(
            lambda xy: nn.functional.cross_entropy(model(xy[0].to(here.device)), xy[1].to(here.device)), batches
        )
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def deterministic(setting: Setting) -> dict[str, object]:
    """Trains with `deterministic=True` on all ranks and then on one rank; the parameters must be bitwise equal."""
    with session(setting, theirs=False) as here:
        alone = [dist.new_group([rank]) for rank in range(here.size)][here.rank]
        ends = []
        for group, size, rank in ((None, here.size, here.rank), (alone, 1, 0)):
            torch.manual_seed(0)
            model = dist.DistributedDataParallel(
                Network().to(here.device),
                process_group=group,
                deterministic=True,
                logical_shards=SHARDS,
                seed=0,
            )
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            for step in range(5):
                inputs, targets = (each[rank::size].to(here.device) for each in batch(step, 0))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            ends.append({name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()})
        differs = [name for name, one in ends[0].items() if not torch.equal(one.cpu(), ends[1][name].cpu())]
        if differs:
            raise AssertionError(f"rank {here.rank}: {', '.join(differs)} differ between {here.size} ranks and one")
        return {"tensors": len(ends[0])}


def diloco(setting: Setting) -> dict[str, object]:
    """Trains locally and exchanges every fifth step; afterwards all ranks must have the same parameters."""
    with session(setting, theirs=False) as here:
        torch.manual_seed(0)
        model = _layers().to(here.device)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        exchange = dist.DiLoCo(model, inner, outer, every=5)
        told = []
        for step in range(STEPS):
            inputs, targets = (each.to(here.device) for each in batch(step, here.rank))
            inner.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            inner.step()
            exchange.step()
            told.append(loss.item())
        exchange.finish()
        _require_equal_parameters(here, model)
        return {"first loss": told[0], "last loss": told[-1]}


def _require_equal_parameters(here: Session, model: nn.Module) -> None:
    mine = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(here.size)]
    dist.all_gather(everyones, mine)
    if not all(torch.equal(each, mine) for each in everyones):
        raise AssertionError(f"rank {here.rank}: the ranks' parameters differ")


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.RNN(6, 12)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, packed: rnn.PackedSequence) -> torch.Tensor:
        _, hidden = self.cells(packed)
        return self.last(hidden[-1])


def packed_sequences(setting: Setting) -> dict[str, object]:
    """Trains on a PackedSequence, which `device_ids` moves to the device."""
    with session(setting, theirs=False) as here:
        torch.manual_seed(0)
        ids = None if here.device.type == "cpu" else [here.device.index]
        model = dist.DistributedDataParallel(_Recurrent().to(here.device), device_ids=ids)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + here.rank)
            sequences = [torch.randn(length, 6, generator=generator) for length in (5, 3, 2)]
            optimizer.zero_grad()
            model(rnn.pack_sequence(sequences)).square().mean().backward()
            optimizer.step()
        _require_equal_parameters(here, model)
        return {}


def device_objects(setting: Setting) -> None:
    """Gathers objects that contain tensors on the device."""
    with session(setting, theirs=False) as here:
        told: list[Any] = [None] * here.size
        dist.all_gather_object(told, {"loss": torch.full((2,), float(here.rank), device=here.device)})
        values = [each["loss"].cpu().tolist() for each in told]
        if values != [[float(rank)] * 2 for rank in range(here.size)]:
            raise AssertionError(f"the objects hold {values}")


def several_tensors(setting: Setting) -> None:
    """Calls collectives that take lists of tensors: the coalesced and the multi-GPU variants."""
    with session(setting, theirs=False) as here:
        total = here.size * (here.size + 1) / 2
        tensors = [torch.full((count,), here.rank + 1.0, device=here.device) for count in (1, 4, 0, 7)]
        dist.all_reduce_coalesced(tensors)
        if not all(bool(each.eq(total).all()) for each in tensors):
            raise AssertionError(f"all_reduce_coalesced made {[each.tolist() for each in tensors]}")
        listed = [torch.full((5,), here.rank + 1.0, device=here.device)]
        dist.all_reduce_multigpu(listed)
        if not bool(listed[0].eq(total).all()):
            raise AssertionError(f"all_reduce_multigpu made {listed[0].tolist()}")
        outputs = [[torch.empty(3, device=here.device) for _ in range(here.size)]]
        dist.all_gather_multigpu(outputs, [torch.full((3,), float(here.rank), device=here.device)])
        if [each[0].item() for each in outputs[0]] != list(map(float, range(here.size))):
            raise AssertionError(f"all_gather_multigpu made {[each.tolist() for each in outputs[0]]}")


def default_device(setting: Setting) -> None:
    """Trains with the device as torch's default, so that tensors created without `device=` are on it."""
    with session(setting, theirs=False) as here:
        torch.set_default_device(here.device)
        model = dist.DistributedDataParallel(nn.Linear(4, 2))
        model(torch.ones(3, 4)).sum().backward()
        told: list[Any] = [None] * here.size
        dist.all_gather_object(told, here.rank)
        dist.barrier()
        optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
