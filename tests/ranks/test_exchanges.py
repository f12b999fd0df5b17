"""DiLoCo's exchanges when a rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
import torch
from local_reference import RATE, build, inner_step
from torch import nn

import paceline as dist

SGD = torch.optim.SGD


def nesterov(model: nn.Module, lr: float = 0.7, momentum: float = 0.9) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)


def train(local: dist.DiLoCo, model: nn.Module, inner: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        inner_step(model, inner, dist.get_rank(), step)
        local.step()


def die_in_an_exchange(grace_s: float | None) -> None:
    dist.init_process_group()
    model = build()
    inner = SGD(model.parameters(), lr=RATE)
    diloco = dist.DiLoCo(model, inner, nesterov(model), every=2, delay=0, grace_s=grace_s)
    train(diloco, model, inner, [1])
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError, match="(?s)rank 1 .* died.*exchange 0 of outer gradients"):
        train(diloco, model, inner, [2])


@pytest.mark.parametrize("grace_s", [None, 100.0])
def test_ranks_that_stay_raise_when_one_dies(ranks, grace_s):
    with ranks(3).start(die_in_an_exchange, grace_s) as world:
        world.join(expect_dead=[1])
