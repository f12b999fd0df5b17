"""Programs with the usual training loop for tests of elastic jobs; they record which samples each step used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline as dist

SAMPLES = 22
BATCH = 2
RATE = 0.1
_WAITING_S = 0.2


class Center(nn.Module):
    """Subtracts a running mean, as batch normalization does, but also accepts a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("has_begun", torch.tensor(False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the inputs minus the running mean."""
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        self.batches += 1
        self.has_begun.fill_(True)
        return inputs - self.mean


class Counted(nn.Module):
    """A network with a parameter `used`, whose gradient is each sample's share in the step's mean."""

    def __init__(self, centers: bool) -> None:
        super().__init__()
        center = Center() if centers else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 8), center, nn.Tanh(), nn.Linear(8, 3))
        self.used = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, indices: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits, and a term that adds the samples' shares to the loss."""
        return self.net(inputs), self.used[indices].mean()


@dataclass
class Steps:
    """The samples' shares in each committed step, and the view changes, as part of the state."""

    shares: list[dict[int, float]] = field(default_factory=list)
    views: list[list[Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Returns the record."""
        return {"shares": [list(each.items()) for each in self.shares], "views": self.views}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the record with another worker's."""
        self.shares = [dict(map(tuple, each)) for each in state["shares"]]
        self.views = list(state["views"])


def dataset() -> TensorDataset:
    """Returns the samples with their indices."""
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=drawn)
    return TensorDataset(torch.arange(SAMPLES), inputs, torch.randint(0, 3, (SAMPLES,), generator=drawn))


class Stream(IterableDataset):
    """The same samples as a stream, which can only be read sequentially."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the samples."""
        return iter(dataset())


def build(centers: bool, adapts: bool = False) -> tuple[Counted, torch.optim.Optimizer]:
    """Returns the network and its optimizer."""
    torch.manual_seed(0)
    model = Counted(centers)
    if adapts:
        return model, torch.optim.AdamW(model.net.parameters(), lr=RATE)
    return model, torch.optim.SGD(model.net.parameters(), lr=RATE, momentum=0.5)


def train(
    epochs: int,
    step_s: float = 0.0,
    *,
    centers: bool = False,
    weighs: bool = False,
    skips: str = "",
    streams: bool = False,
    num_workers: int = 0,
    complete: int = 0,
    adapts: bool = False,
    meddles: str = "",
) -> dict[str, Any]:
    """Trains; returns the digest of the state, the parameters and the record.

    Args:
        epochs: The number of epochs.
        step_s: The minimum duration of a step in seconds.
        complete: The number of workers below which steps are slow, so that missing workers join before the end.
        adapts: True for AdamW with gradient clipping and a learning rate that changes in each step.
        meddles: "clamp" to change parameters after each step, or "closure" to step with a closure.
        centers: True if the network has buffers.
        weighs: True if a rank's weight is its number of samples.
        skips: "sample" to skip each batch with sample 7, "error" to skip it after an error in its backward pass, or
            "step" to skip the third step on all ranks.
        streams: True if the dataset is a stream.
        num_workers: The number of loader processes of each worker.
    """
    dist.init_process_group(elastic=True)
    inner, optimizer = build(centers, adapts)
    model = dist.DistributedDataParallel(inner)
    loader = dist.StatefulLoader(Stream() if streams else dataset(), BATCH, num_workers=num_workers)
    steps = Steps()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97 if adapts else 1.0)
    state = dist.ElasticState(
        model,
        optimizer=optimizer,
        loader=loader,
        schedule=schedule,
        steps=steps,
        on_view=lambda change: steps.views.append([change.workers, [*change.came], [*change.went]]),
    )
    for _ in state.epochs(epochs):
        for indices, inputs, targets in loader:
            model.zero_grad()
            if weighs:
                model.weight(len(indices))
            logits, shares = model(indices, inputs)
            loss = nn.functional.cross_entropy(logits, targets) + shares
            has_seventh = 7 in indices.tolist()
            if (skips == "sample" and has_seventh) or (skips == "step" and len(steps.shares) == 2):
                state.skip_batch()
            elif skips == "error" and has_seventh:
                skip_after_error(state, loss, logits)
            else:
                loss.backward()
            steps.shares.append(_shares(inner.used.grad))
            if adapts:
                nn.utils.clip_grad_norm_(inner.net.parameters(), 0.05)
            optimizer.step(lambda: 0.0) if meddles == "closure" else optimizer.step()
            schedule.step()
            if meddles == "clamp":
                for param in inner.net.parameters():
                    param.data.clamp_(-0.1, 0.1)
            time.sleep(_WAITING_S if dist.get_world_size() < complete else step_s)
    return {
        "digest": state.digest(),
        "shares": steps.shares,
        "views": steps.views,
        "buffers": [buffer.tolist() for buffer in inner.buffers()],
        "parameters": [param.tolist() for param in inner.net.parameters()],
    }


def train_and_save(epochs: int, directory: str) -> dict[str, Any]:
    """Resumes from the newest checkpoint, trains, and saves every third step; returns the digest and the record."""
    dist.init_process_group(elastic=True)
    inner, optimizer = build(centers=True)
    model = dist.DistributedDataParallel(inner)
    loader = dist.StatefulLoader(dataset(), BATCH)
    steps = Steps()
    state = dist.ElasticState(model, optimizer=optimizer, loader=loader, steps=steps)
    with dist.CheckpointManager(directory, every=3, keep=2) as manager:
        restored = manager.restore({"all": state})
        for _ in state.epochs(epochs):
            for indices, inputs, targets in loader:
                model.zero_grad()
                logits, shares = model(indices, inputs)
                (nn.functional.cross_entropy(logits, targets) + shares).backward()
                steps.shares.append(_shares(inner.used.grad))
                optimizer.step()
                manager.save(len(steps.shares), {"all": state})
    return {"digest": state.digest(), "shares": steps.shares, "restored": restored}


def skip_after_error(state: dist.ElasticState, loss: torch.Tensor, logits: torch.Tensor) -> None:
    """Raises an error during the backward pass, and skips the batch."""

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("out of luck")

    logits.register_hook(fail)
    try:
        loss.backward()
    except ArithmeticError:
        state.skip_batch()


def careless(epochs: int) -> None:
    """Skips the backward pass of one batch on worker 0.1.0."""
    dist.init_process_group(elastic=True)
    inner, optimizer = build(centers=False)
    model = dist.DistributedDataParallel(inner)
    loader = dist.StatefulLoader(dataset(), BATCH)
    state = dist.ElasticState(model, optimizer=optimizer, loader=loader)
    for _ in state.epochs(epochs):
        for step, (indices, inputs, _) in enumerate(loader):
            if step != 1 or os.environ["PACELINE_WORKER"] != "0.1.0":
                sum(each.sum() for each in model(indices, inputs)).backward()
                optimizer.step()


def _shares(gradient: torch.Tensor | None) -> dict[int, float]:
    if gradient is None:
        return {}
    return {index: gradient[index].item() for index in gradient.nonzero().flatten().tolist()}
