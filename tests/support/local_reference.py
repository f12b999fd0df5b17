"""A reference implementation of DiLoCo for all ranks in one process, without threads or communication."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.train.diloco.outer_parameters import cut

RATE = 0.05


def build(seed: int = 0) -> nn.Sequential:
    """Returns a small network with four parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    """Returns a rank's inputs for a step."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Trains on one batch."""
    optimizer.zero_grad()
    model(batch(rank, step)).square().sum().backward()
    optimizer.step()


@dataclass
class Reference:
    """All ranks; `outer` holds the synchronized parameters, and `models` the model that each rank trains."""

    ranks: int
    every: int
    fragments: int
    delay: int
    mix: float
    outer_lr: float
    momentum: float
    models: list[nn.Sequential] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Creates the models."""
        self.models = [build() for _ in range(self.ranks)]
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=RATE) for each in self.models]
        self.outer = [param.detach().clone() for param in build().parameters()]
        self.speeds = [torch.zeros_like(each) for each in self.outer]
        self.runs = cut([each.numel() for each in self.outer], self.fragments)
        self.begun: dict[tuple[int, int], list[torch.Tensor]] = {}  # means, by fragment and by step that applies them
        self.before: dict[tuple[int, int], list[list[torch.Tensor]]] = {}  # each rank's values at the start

    def train(self, first: int, last: int) -> None:
        """Runs the steps from `first` to `last`, counted from 1."""
        for step in range(first, last + 1):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                inner_step(model, optimizer, rank, step)
            self.exchange(step)

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Starts and applies the exchanges that are due after a step."""
        for fragment in range(self.fragments):
            if self.delay:
                self._use(step, fragment)
        for fragment, run in enumerate(self.runs):
            place = -(-(fragment + 1) * self.every // self.fragments)
            if step >= place and (step - place) % self.every == 0:
                mine = [list(model.parameters()) for model in self.models]
                means = [self.outer[at] - sum(each[at] for each in mine) / self.ranks for at in run]
                self.begun[step + self.delay, fragment] = [each.clone() for each in means]
                self.before[step + self.delay, fragment] = [[each[at].clone() for at in run] for each in mine]
            self._use(step, fragment)

    def _use(self, step: int, fragment: int) -> None:
        means = self.begun.pop((step, fragment), None)
        if means is None:
            return
        befores = self.before.pop((step, fragment))
        for place, (at, mean) in enumerate(zip(self.runs[fragment], means, strict=True)):
            self.speeds[at] = self.momentum * self.speeds[at] + mean
            self.outer[at] = self.outer[at] - self.outer_lr * (mean + self.momentum * self.speeds[at])
            for model, before in zip(self.models, befores, strict=True):
                param = list(model.parameters())[at]
                start = self.outer[at] + self.mix * (before[place] - self.outer[at])
                param.copy_(start + (param - before[place]))

    @torch.no_grad()
    def use_rest(self) -> None:
        """Applies the pending exchanges."""
        for step, fragment in sorted(self.begun):
            self._use(step, fragment)

    @torch.no_grad()
    def mean(self) -> list[torch.Tensor]:
        """Returns the mean of the models' parameters."""
        everyones = zip(*(model.parameters() for model in self.models), strict=True)
        return [torch.stack(each).mean(0) for each in everyones]
