"""The two kinds of training loops: in logical shards, and the usual one with a `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import nn

from paceline.data.loader import StatefulLoader
from paceline.elastic.averaging import Averaging
from paceline.elastic.connection import LauncherConnection, same_bits_as
from paceline.elastic.joining.steps import Steps
from paceline.elastic.registry import Registry, Stateful
from paceline.elastic.rounds import Rounds
from paceline.parallel.ddp.module import DistributedDataParallel
from paceline.parallel.sharded.logical import LogicalShards


class Loop(Protocol):
    """What differs between the loops.

    Attributes: `can_learn`, whether a worker that comes late can catch up while the others train.
    """

    can_learn: bool

    def registry(self, others: dict[str, Stateful]) -> Registry:
        """Returns the state of the module and of the others."""
        ...

    def rounds(self, connection: LauncherConnection, registry: Registry, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that add up the loop's gradients from now on; `on_batch` is called before each batch."""
        ...

    def fingerprint(self) -> str:
        """Returns what must be equal on two workers that train together."""
        ...


class ShardsLoop:
    """The loop in logical shards: the bits of its results do not depend on the workers."""

    can_learn = True

    def __init__(self, shards: LogicalShards) -> None:
        self._shards = shards

    def registry(self, others: dict[str, Stateful]) -> Registry:
        """Returns the state of the module and of the others."""
        return Registry(self._shards.module, others)

    def rounds(self, connection: LauncherConnection, registry: Registry, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that add up the shards' gradients from now on."""
        shards = self._shards

        def deal(mine: range) -> None:
            shards.mine = mine

        rounds = Rounds(shards.count, connection, registry, deal)
        shards.sum_by(rounds, on_batch)
        return rounds

    def fingerprint(self) -> str:
        """Returns what must be equal on two workers for their results to have the same bits."""
        return same_bits_as(
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            self._shards.count,
            self._shards.seed,
            _described(self._shards.module),
        )


class UsualLoop:
    """The loop with a `DistributedDataParallel` and a `StatefulLoader`.

    Raises:
        ValueError: there is not exactly one StatefulLoader among the others, or the module or the loader was made with
            an option that needs ranks which stay.
    """

    def __init__(self, model: DistributedDataParallel, others: Collection[Stateful]) -> None:
        loaders = [each for each in others if isinstance(each, StatefulLoader)]
        if len(loaders) != 1:
            raise ValueError(
                f"ElasticState got a DistributedDataParallel and {len(loaders)} StatefulLoaders; give it the one whose "
                "batches the module is trained on, as loader=loader, since workers come and go between its batches"
            )
        (self._loader,) = loaders
        self.can_learn = False
        self._model = model
        self._on_batch: Callable[[], None] | None = None
        self._averaging = Averaging(model, self._loader, self._begin_batch)

    def registry(self, others: dict[str, Stateful]) -> Registry:
        """Returns the state of the module and of the others."""
        registry = Registry(self._model.module, others, is_replicated=False)
        self.can_learn = bool(registry.optimizers)
        return registry

    def rounds(self, connection: LauncherConnection, registry: Registry, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that average the module's gradients from now on."""
        rounds = Rounds(1, connection, registry, lambda _: None, Steps(registry.optimizers))
        self._on_batch = on_batch
        self._averaging.average_by(rounds, connection.name)
        return rounds

    def fingerprint(self) -> str:
        """Returns what must be equal on two workers for their gradients and their loaders to fit together."""
        loader = self._loader
        dealt = loader.state_dict()["length"], loader.batch_size, loader.shuffle, loader.seed, loader.remainder
        return same_bits_as("DistributedDataParallel", torch.__version__, dealt, _described(self._model.module))

    def _begin_batch(self) -> None:
        if self._on_batch is not None:
            self._on_batch()


def _described(module: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
