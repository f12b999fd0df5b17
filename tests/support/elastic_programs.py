"""Training programs for tests of elastic jobs. Most accept a number of epochs and return the digest of their state."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import paceline as dist
from paceline.train.elastic.worker import view_group
from paceline.train.elastic.worker.progress import WorkerProgress
from paceline.train.elastic.worker.view_group import ViewGroup

SHARDS = 4
_WAITING_S = 0.2
_LONGEST_S = 50.0


def train(
    epochs: int,
    shards: int = SHARDS,
    step_s: float = 0.0,
    num_workers: int = 0,
    ballast_mib: int = 0,
    shard_s: float = 0.0,
    complete: int = 0,
) -> str:
    """Trains a network with batch normalization and dropout, and evaluates it after each epoch.

    Each step is delayed by `step_s`, and each shard by `shard_s`; the state is larger by `ballast_mib`. With fewer than
    `complete` workers, steps are slow, so that missing workers join before the end.
    """
    dist.init_process_group(elastic=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(47, 8, generator=drawn)
    dataset = torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (47,), generator=drawn))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    logical = dist.LogicalShards(model, shards)
    loader = dist.ShardLoader(dataset, 3, logical, num_workers=num_workers)
    test = dist.ShardLoader(dataset, 5, logical, shuffle=False)
    seen = Seen()
    others = {"scheduler": scheduler, "loader": loader, "seen": seen, "ballast": Ballast(ballast_mib)}
    state = dist.ElasticState(logical, optimizer=optimizer, **others)

    def loss_of(xy: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(shard_s)
        return nn.functional.cross_entropy(model(xy[0]), xy[1])

    for _ in state.epochs(epochs):
        for batches in loader:
            optimizer.zero_grad()
            loss = logical.backward(loss_of, batches)
            optimizer.step()
            scheduler.step()
            seen.losses.append(loss.item())
            is_waiting = dist.get_world_size() < complete and not state.is_replaying
            time.sleep(_WAITING_S if is_waiting else step_s)
        correct = logical.evaluate(lambda xy: (model(xy[0]).argmax(1) == xy[1]).sum(), test)
        seen.losses.append(correct.item())
    assert len(seen.losses) == epochs * 5
    return state.digest()


def train_with_a_slow_newcomer(newcomer: str, *arguments: Any) -> tuple[str, list[bool]]:
    """Trains as `train` does, but a newcomer forms a planned view only after replaying two more of the others' rounds.

    Returns:
        The digest, and for each planned view of the newcomer, True if the others continued in the meantime.
    """
    view_group._HEAD_START_S = _LONGEST_S
    form, commit = ViewGroup._form, WorkerProgress.commit
    commits = 0
    waits: list[bool] = []

    def count(self: WorkerProgress, *, is_replay: bool) -> None:
        nonlocal commits
        commits += 1
        commit(self, is_replay=is_replay)

    def form_late(self: ViewGroup) -> None:
        if self.view.is_planned:
            before, until_s = commits, time.monotonic() + _LONGEST_S / 2
            while commits < before + 2 and time.monotonic() < until_s:
                time.sleep(0.002)
            waits.append(commits >= before + 2)
        form(self)

    WorkerProgress.commit = count
    if os.environ["PACELINE_WORKER"] == newcomer:
        ViewGroup._form = form_late
    return train(*arguments), waits


def train_and_save(epochs: int, directory: str, asynchronous: bool) -> str:
    """Trains a network and saves a checkpoint every third step; an epoch has four steps."""
    dist.init_process_group(elastic=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    dataset = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logical = dist.LogicalShards(model, SHARDS)
    loader = dist.ShardLoader(dataset, 3, logical)
    state = dist.ElasticState(logical, optimizer=optimizer, loader=loader)
    with dist.CheckpointManager(directory, every=3, keep=2, asynchronous=asynchronous) as manager:
        for epoch in state.epochs(epochs):
            for batches in loader:
                optimizer.zero_grad()
                logical.backward(lambda x: model(x[0]).square().mean(), batches)
                optimizer.step()
                manager.save(4 * epoch + loader.state_dict()["step"], {"all": state})
    return state.digest()


def count_shards(steps: int) -> int:
    """Trains one epoch; returns the number of shards that this worker computed."""
    dist.init_process_group(elastic=True)
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    logical = dist.LogicalShards(model, SHARDS)
    loader = dist.ShardLoader(torch.utils.data.TensorDataset(torch.ones(steps * SHARDS, 8)), 1, logical)
    state = dist.ElasticState(logical, optimizer=optimizer, loader=loader)
    computed = 0

    def loss(x: list[torch.Tensor]) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return model(x[0]).square().mean()

    for _ in state.epochs(1):
        for batches in loader:
            logical.backward(loss, batches)
            optimizer.step()
    return computed


def look_around(steps: int) -> list[tuple[bool, int, int, bool]]:
    """Returns, for each step, whether it was replayed, the rank, the world size, and whether a collective succeeded."""
    dist.init_process_group(elastic=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    logical = dist.LogicalShards(model, SHARDS)
    loader = dist.ShardLoader(torch.utils.data.TensorDataset(torch.ones(steps * SHARDS, 4)), 1, logical)
    state = dist.ElasticState(logical, loader=loader)
    seen = []

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.02)
        return model(batch[0]).mean()

    for _ in state.epochs(1):
        for batches in loader:
            logical.backward(loss_of, batches)
            works = True
            if state.is_replaying:
                try:
                    dist.barrier()
                except ValueError as error:
                    works = "replays=False" not in str(error)
            seen.append((state.is_replaying, dist.get_rank(), dist.get_world_size(), works))
    return seen


class Seen:
    """The losses and counts that a worker has recorded, as part of the state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the recorded values."""
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Replaces the recorded values with another worker's."""
        self.losses = list(state["losses"])


class Ballast:
    """A state of a given size."""

    def __init__(self, mib: int) -> None:
        self._tensor = torch.arange(mib << 17, dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the tensor."""
        return {"tensor": self._tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads another worker's tensor."""
        self._tensor.copy_(state["tensor"])


def train_with_a_fault(epochs: int, worker: str, fault: str, since: int = 5) -> str:
    """Trains; on one worker, memory is corrupted in step `since`, or sums are wrong from that step on."""
    dist.init_process_group(elastic=True)
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    logical = dist.LogicalShards(model, SHARDS)
    loader = dist.ShardLoader(torch.utils.data.TensorDataset(inputs), 3, logical)
    state = dist.ElasticState(logical, optimizer=optimizer, loader=loader)
    is_faulty = os.environ["PACELINE_WORKER"] == worker
    step = 0
    for _ in state.epochs(epochs):
        for batches in loader:
            step += 1
            if is_faulty and fault == "memory" and step == since:
                model.weight.data[0, 0] += 1e-3
            factor = 1.0001 if is_faulty and fault == "sums" and step >= since else 1.0
            optimizer.zero_grad()
            logical.backward(lambda x, factor=factor: model(x[0]).square().mean() * factor, batches)
            optimizer.step()
    return state.digest()
