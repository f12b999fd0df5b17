"""The execution of a pipeline's program: messages between stages, and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as dist


class Growing(nn.Module):
    """A layer whose output size depends on how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.ones(x.size(0), 2 + self.calls // 3) * self.weight


def unsteady_sizes() -> None:
    dist.init_process_group()
    pipeline = dist.Pipeline([Growing(), nn.ReLU()], lambda x, _: x.mean(), micro_batches=2, split=[1, 1])
    batch_ = torch.ones(4, 1)
    pipeline.step(batch_, batch_)
    with pytest.raises(RuntimeError if pipeline.is_first else dist.CollectiveError) as failure:
        pipeline.step(batch_, batch_)
    dist.destroy_process_group()
    if pipeline.is_first:
        assert r"has become float32[2, 3]; with a batch of this size it was float32[2, 2]" in str(failure.value)


def test_an_activation_that_changes_its_size_is_named(ranks):
    ranks(2)(unsteady_sizes)


def with_amp() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    pipeline = dist.Pipeline(layers, nn.functional.cross_entropy, micro_batches=4, schedule="zero_bubble")
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = dist.GradScaler(init_scale=4.0, group=dist.group.WORLD)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for step in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(pipeline.step(x, y, scaler=scaler).item())
        if step == 5 and pipeline.is_last:
            next(pipeline.parameters()).grad.fill_(float("inf"))
        before = [each.detach().clone() for each in pipeline.parameters()]
        scaler.step(optimizer)
        skipped = all(map(torch.equal, before, pipeline.parameters()))
        assert skipped == (step == 5), "all ranks skip the step in which one has an infinity"
        scaler.update(4.0)
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_autocast_and_infinities_in_a_pipeline(ranks):
    ranks(2)(with_amp)
