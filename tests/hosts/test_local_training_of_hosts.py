"""DiLoCo between hosts, also over a line of 10 Mbit/s with 20 ms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as dist

STEPS = 8


def train(wire: str | None, grace_s: float | None, width: int) -> list[float]:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = dist.DiLoCo(model, inner, outer, every=4, fragments=2, wire=wire, delay=1, grace_s=grace_s)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(8, 16, generator=generator)
        loss = (model(inputs) - inputs).square().mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
        diloco.step()
        losses.append(loss.item())
    diloco.finish()
    for param in (*model.parameters(), *diloco.outer_module.parameters()):
        everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(each, everyone[0]) for each in everyone)
    dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("grace_s", [None, 60.0])
def test_a_line_of_ten_megabit_trains(hosts, grace_s):
    losses = hosts(2, 1, rate="10mbit", delay_ms=20)(train, None, grace_s, 256)  # an exchange takes 0.2 s
    assert all(each[-1] < each[0] for each in losses)


def test_two_hosts_of_two_ranks_train(hosts):
    hosts(2, 2)(train, None, None, 64)
