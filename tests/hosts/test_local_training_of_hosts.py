"""DiLoCo between hosts, including a link of 10 Mbit/s with a delay of 20 ms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as dist

STEPS = 8


def train_apart(wire: str | None, grace_s: float | None, width: int) -> tuple[float, float]:
    """Returns the loss before and after training."""
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = dist.DiLoCo(model, inner, outer, every=4, fragments=2, wire=wire, delay=1, grace_s=grace_s)
    generator = torch.Generator().manual_seed(rank)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        return (model(inputs) - inputs).square().mean()

    samples = torch.randn(64, 16)
    before = loss_of(samples).item()
    for _ in range(STEPS):
        inner.zero_grad()
        loss_of(torch.randn(8, 16, generator=generator)).backward()
        inner.step()
        diloco.step()
    diloco.finish()
    after = loss_of(samples).item()
    for param in (*model.parameters(), *diloco.outer_module.parameters()):
        everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(each, everyone[0]) for each in everyone)
    dist.destroy_process_group()
    return before, after


@pytest.mark.parametrize("grace_s", [None, 60.0])
def test_a_line_of_ten_megabit_trains(hosts, grace_s):
    losses = hosts(2, 1, rate="10mbit", delay_ms=20)(train_apart, None, grace_s, 256)  # an exchange takes 0.2 s
    assert all(after < before for before, after in losses)


def train_in_step_within_a_host() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank)
    model = dist.DistributedDataParallel(nn.Linear(6, 4), process_group=hosts[rank // 2])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    local = dist.LocalSGD(model, inner, every=3, process_group=across[rank % 2])
    for step in range(1, 6):
        inner.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        inner.step()
        local.step()
        everyone = [torch.empty_like(model.module.weight) for _ in range(4)]
        dist.all_gather(everyone, model.module.weight.detach())
        assert torch.equal(everyone[0], everyone[1]), "ranks of one host are in step"
        assert torch.equal(everyone[0], everyone[2]) == (step == 3), "hosts are where they have averaged"
    local.finish()


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_rounded_outer_gradients_have_equal_bits(hosts, wire):
    losses = hosts(2, 2)(train_apart, wire, None, 64)
    assert all(after < before for before, after in losses)


def test_hosts_train_apart_and_their_ranks_in_step(hosts):
    hosts(2, 2)(train_in_step_within_a_host)
