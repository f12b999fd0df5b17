"""Local SGD: ranks train by themselves and average their parameters now and then."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.group.compression import WireKind
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.diloco.diloco import DiLoCo


class LocalSGD(DiLoCo):
    """Lets each rank train by itself, and averages the parameters over the ranks once in `every` steps.

    This is local SGD (Stich 2019), also known as periodic model averaging: DiLoCo whose outer optimizer is SGD with a
    learning rate of 1. With a delay of 0 all ranks go on from the mean; `every=1` averages after each step.

    Args:
        model: see `DiLoCo`.
        inner: the optimizer with which each rank trains, whose state is to be in `state_dict`; None to keep it apart.
        every: the number of inner steps after which the parameters are averaged.
        fragments, wire, delay, mix, grace_s, process_group: see `DiLoCo`; the delay is 0 by default.

    Example::

        local = paceline.LocalSGD(model, every=16)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            local.step()
        local.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | None = None,
        every: int = 16,
        fragments: int = 1,
        wire: WireKind | None = None,
        *,
        delay: int = 0,
        mix: float = 0.0,
        grace_s: float | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        super().__init__(
            model,
            inner,
            outer,
            every,
            fragments,
            wire,
            delay=delay,
            mix=mix,
            grace_s=grace_s,
            process_group=process_group,
        )
