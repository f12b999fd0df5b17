"""Elastic jobs train on devices: workers die and join, and forked senders never use the device."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import elastic_job
import fake_device
import pytest
import torch
from elastic_job import Outcome
from torch import nn

import paceline as dist

pytestmark = pytest.mark.timeout(400)  # the first test may have to build the device

EPOCHS = 3
FIRST, SECOND, REPLACEMENT = "0.0.0", "0.1.0", "0.1.1"


class Record:
    """The workers of each view, as part of the state."""

    def __init__(self) -> None:
        self.workers: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.workers = [*state["workers"]]


def on_a_device() -> str:
    fake_device.load()
    torch.ones(1, device="fake")  # from now on, a child of this process cannot use the device
    return f"fake:{int(os.environ['PACELINE_WORKER'].split('.')[1]) % 2}"


def network(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 2))


def dataset() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))


def pause(waits_for: int) -> None:
    """Slows down the steps while workers are missing, so that the missing workers join before the end."""
    time.sleep(0.2 if dist.get_world_size() < waits_for else 0.003)


def result(state: dist.ElasticState, module: nn.Module, record: Record) -> tuple[str, list[int], list[list[float]]]:
    return state.digest(), record.workers, [param.detach().cpu().flatten().tolist() for param in module.parameters()]


def shards_loop(waits_for: int) -> object:
    device = on_a_device()
    dist.init_process_group(elastic=True)
    module, record = network(0.2).to(device), Record()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    shards = dist.LogicalShards(module, 4)
    loader = dist.ShardLoader(dataset(), 2, shards)
    state = dist.ElasticState(
        shards,
        optimizer=optimizer,
        loader=loader,
        on_view=lambda change: record.workers.append(change.workers),
    )
    with torch.fake.delays(seed=1, most_us=50):
        for _ in state.epochs(EPOCHS):
            for batches in loader:
                optimizer.zero_grad()
                loss = shards.backward(lambda x: module(x[0].to(device)).square().mean(), batches)
                assert loss.device == torch.device(device)
                optimizer.step()
                if not state.is_replaying:
                    pause(waits_for)
    return result(state, module, record)


def ddp_loop(waits_for: int) -> object:
    device = on_a_device()
    dist.init_process_group(elastic=True)
    module, record = network(0.0).to(device), Record()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    model = dist.DistributedDataParallel(module)
    loader = dist.StatefulLoader(dataset(), 2, remainder="drop")
    state = dist.ElasticState(
        model,
        optimizer=optimizer,
        loader=loader,
        record=record,
        on_view=lambda change: record.workers.append(change.workers),
    )
    with torch.fake.delays(seed=1, most_us=50):
        for _ in state.epochs(EPOCHS):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs.to(device)).square().mean().backward()
                assert all(param.grad.device == param.device for param in module.parameters())
                optimizer.step()
                pause(waits_for)
    return result(state, module, record)


def run(loop: Any, workers: int, failpoints: str = "") -> Outcome:
    fake_device.build()
    outcome = elastic_job.run(
        functools.partial(loop, workers),
        workers=workers,
        failpoints=failpoints,
        policy={"gather_s": 0.05, "start_patience_s": 30.0},
        timeout_s=100,
    )
    assert outcome.code == 0 and not outcome.errors, outcome
    return outcome


def only_result(outcome: Outcome) -> tuple[str, list[int], list[list[float]]]:
    first, *others = outcome.results.values()
    assert all(other[0] == first[0] and other[2] == first[2] for other in others)
    return first


@functools.cache
def shards_alone() -> str:
    return only_result(run(shards_loop, 1))[0]


@pytest.mark.parametrize("point", ["round.voted", pytest.param("round.computed", marks=pytest.mark.soak)])
def test_shards_keep_their_bits_when_a_worker_dies(point):
    outcome = run(shards_loop, 2, f"{SECOND}:{point}@3=kill")
    assert only_result(outcome)[0] == shards_alone()
    assert REPLACEMENT in outcome.results  # it has received the first worker's state


@pytest.mark.parametrize("point", ["mean.applied", pytest.param("round.computed", marks=pytest.mark.soak)])
def test_replicas_stay_equal_when_a_worker_dies(point):
    outcome = run(ddp_loop, 2, f"{SECOND}:{point}@3=kill")
    _, workers, _ = only_result(outcome)
    assert REPLACEMENT in outcome.results
    assert workers[0] == 2 and workers[-1] == 2 and 1 in workers
