"""Pipelines of two stages do not hang, regardless of the stages' speeds: a thousand runs of eight micro-batches.

pytest -m soak tests/ranks/test_pipeline_soak.py -s
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import nn
from world import Ranks

import paceline as dist

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

WORLDS = 10
RUNS = 25  # per world, each with its own pipeline
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}


class Uneven(nn.Module):
    """A layer whose duration varies."""

    def __init__(self, pace: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self._pace = pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._pace.random() < 0.3:
            time.sleep(self._pace.random() / 1000)
        return torch.tanh(self.layer(x))


def run_pipelines(schedule: str, seed: int) -> None:
    dist.init_process_group(timeout=60)
    torch.set_num_threads(1)
    pace = random.Random(1000 * seed + dist.get_rank())
    for run in range(RUNS):
        torch.manual_seed(run)
        layers = [Uneven(pace) for _ in range(4)]
        x = torch.randn(16, 16)
        expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), x).detach()
        pipeline = dist.Pipeline(
            layers, nn.functional.mse_loss, micro_batches=8, schedule=schedule, stages_per_rank=SCHEDULES[schedule]
        )
        for _ in range(2):
            loss = pipeline.step(x if pipeline.is_first else None, x if pipeline.is_last else None)
            torch.testing.assert_close(loss.float(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_hundred_and_fifty_runs_do_not_hang(ranks: type[Ranks], schedule: str) -> None:
    for seed in range(WORLDS):
        ranks(2)(run_pipelines, schedule, seed)
    print(f"{schedule}: {WORLDS * RUNS} runs")
