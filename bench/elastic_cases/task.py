"""The training task for all systems: a network that counts, in a parameter, how often each sample was used.

The loss of a batch contains the mean of its samples' tallies. The gradient of this term is constant, so after training
the parameter shows in how many committed steps each sample was used, whatever happened during the job.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

SHARDS = 4
BATCH = 16  # default number of samples per shard in a step
_FEATURES, _HIDDEN, _CLASSES = 256, 512, 10
_POOL = 4096  # number of distinct inputs; samples with higher indices reuse them
_TALLY_RATE = 1.0

Sample = tuple[int, torch.Tensor, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Samples(torch.utils.data.Dataset[Sample]):
    """A data set with exactly as many samples as `steps` steps use."""

    def __init__(self, steps: int, shards: int, batch: int = BATCH) -> None:
        drawn = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(_POOL, _FEATURES, generator=drawn)
        self._labels = torch.randint(0, _CLASSES, (_POOL,), generator=drawn)
        self._count = steps * shards * batch
        self.order = torch.randperm(self._count, generator=drawn)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return index, self._inputs[index % _POOL], self._labels[index % _POOL]


class Network(nn.Module):
    """A network with three layers.

    Args:
        tallies: The number of samples whose uses are counted: all samples, or 1 if the counts are not needed.
    """

    def __init__(self, tallies: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Linear(_FEATURES, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()),
            nn.Linear(_HIDDEN, _CLASSES),
        )
        self.tally = nn.Parameter(torch.zeros(tallies))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the loss."""
        numbers, inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels) + self.tally[numbers % len(self.tally)].mean()


def optimizer_of(network: Network) -> torch.optim.Optimizer:
    groups = [
        {"params": network.layers.parameters(), "momentum": 0.9},
        {"params": [network.tally], "lr": _TALLY_RATE},
    ]
    return torch.optim.SGD(groups, lr=1e-3)


def batch_of(samples: Samples, step: int, shard: int) -> Batch:
    """Returns the batch of a shard in a step counted from 0; each sample is in exactly one batch."""
    first = (step * SHARDS + shard) * BATCH
    batch: Batch = torch.utils.data.default_collate([samples[i] for i in samples.order[first : first + BATCH].tolist()])
    return batch


def leave_result(
    directory: str, slot: int, network: Network, digest: str | None = None, samples_of_a_step: int = SHARDS * BATCH
) -> None:
    """Writes the tallies and the digest of the parameters to a file for the benchmark."""
    uses = (network.tally.detach() * (-samples_of_a_step / _TALLY_RATE)).round()
    result = {"digest": digest, "lost": int((uses == 0).sum()), "repeated": int((uses > 1).sum())}
    path = Path(directory, f"result-{slot}-{os.getpid()}")
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").rename(path)


def arguments() -> argparse.ArgumentParser:
    """Parses the options that every program accepts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, required=True)
    return parser
