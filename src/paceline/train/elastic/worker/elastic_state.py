"""`ElasticState`: the public state of an elastic training run, and its loops with logical shards and with DDP."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from paceline.train.data.loader import StatefulLoader
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.diloco.diloco import DiLoCo
from paceline.train.elastic import failpoints
from paceline.train.elastic.agreement import ViewChange
from paceline.train.elastic.launcher_connection import LauncherConnection, same_bits_as
from paceline.train.elastic.protocol import LeaveNotice
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks
from paceline.train.elastic.training_state import PendingGradients, Stateful, TrainingState
from paceline.train.elastic.worker.diloco_loop import DilocoLoop, described_tensors
from paceline.train.elastic.worker.elastic_averager import ElasticAverager
from paceline.train.elastic.worker.rounds import Rounds
from paceline.train.gradient_use import GRADIENT_USE
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.shared_model.shared_model_optimizer import SharedModelOptimizer
from paceline.train.shared_model.shared_parameters import is_shared


class LogicalShardsLoop:
    """The loop with logical shards, whose results are bitwise equal for any set of workers."""

    can_catch_up = True  # whether a joining worker can catch up while the others train

    def __init__(self, shards: LogicalShards, others: Mapping[str, Stateful]) -> None:
        self._shards = shards
        self.registry = TrainingState(shards.module, others)

    def rounds(self, connection: LauncherConnection, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that will sum the shards' gradients; `on_batch` is called before each batch."""
        shards = self._shards

        def deal(mine: range) -> None:
            shards.mine = mine

        rounds = Rounds(shards.count, connection, self.registry, deal)
        shards.sum_by(rounds, on_batch)
        return rounds

    def fingerprint(self) -> str:
        """Returns a string that is equal on two workers if their results are bitwise equal."""
        facts = {
            "the training loop": "LogicalShards",
            "torch.__version__": torch.__version__,
            "the CPU capability": torch.backends.cpu.get_cpu_capability(),
            "torch.get_num_threads()": torch.get_num_threads(),
            "LogicalShards.count": self._shards.count,
            "LogicalShards.seed": self._shards.seed,
        }
        return same_bits_as(facts | described_tensors(self._shards.module))


class DdpLoop:
    """The loop with a `DistributedDataParallel` and a `StatefulLoader`."""

    def __init__(self, model: DistributedDataParallel, others: Mapping[str, Stateful]) -> None:
        loaders = [other for other in others.values() if isinstance(other, StatefulLoader)]
        if len(loaders) != 1:
            raise ValueError(
                f"ElasticState got a DistributedDataParallel and {len(loaders)} StatefulLoaders; pass the one whose "
                "batches the module is trained on, as loader=loader, because workers join and leave between its "
                "batches"
            )
        (self._loader,) = loaders
        self._model = model
        self._averaging = ElasticAverager(model, self._loader)
        self.registry = TrainingState(model.module, others, is_replicated=False)
        self.can_catch_up = bool(self.registry.optimizers)

    def rounds(self, connection: LauncherConnection, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that will average the module's gradients."""
        rounds = Rounds(1, connection, self.registry, lambda _: None, OptimizerStepHooks(self.registry.optimizers))
        self._averaging.average_by(rounds, connection.name, on_batch)
        return rounds

    def fingerprint(self) -> str:
        """Returns a string that is equal on two workers if their gradients and loaders are compatible."""
        loader = self._loader
        facts = {
            "the training loop": "DistributedDataParallel",
            "torch.__version__": torch.__version__,
            "the length of the loader's dataset": loader.state_dict()["length"],
            "the loader's batch_size": loader.batch_size,
            "the loader's shuffle": loader.shuffle,
            "the loader's seed": loader.seed,
            "the loader's remainder": loader.remainder,
        }
        return same_bits_as(facts | described_tensors(self._model.module))


_PENDING = "pending gradients"  # not an identifier, and thus never a keyword of `ElasticState`


class ElasticState:
    """Continues a training run while workers fail, leave and join.

    The loop uses either `LogicalShards` with `ShardLoader`, or `DistributedDataParallel` with `StatefulLoader` (see
    below). When a worker dies in the middle of a step, the others compute its shards for that step and continue without
    a restart. A worker that joins late runs the script from the start, receives the state in `epochs`, and participates
    starting with the next step. A step depends on the number of shards but not on the number of workers. The results
    are therefore bitwise equal to those of one uninterrupted process.

    Start the script with `paceline run --elastic`. Otherwise, the job consists of this one process.

    Before `epochs`, each worker runs the script on its own, and the default process group has one rank. The script must
    not change the state between taking a batch from the loader and calling `shards.backward`. Schedulers must step
    after the optimizer. When a loop resumes in the middle of an epoch, the lines before the loader's `for` statement
    run again.

    If a worker dies in the DDP loop, the others finish the step with the mean over their own samples, and the dead
    worker's samples are repeated at the end of the epoch. No step is lost, and each sample is used once. The exact
    results depend on when the worker dies. Every worker must call backward, or `skip_batch`, in each batch.

    Args:
        model: The `LogicalShards` or `DistributedDataParallel` that wraps the model, or a `DiLoCo`.
        on_view: A function that is called with a `ViewChange` at the beginning of the first batch after workers have
            joined or left. The argument is the same on every worker, so the function may change learning rates.
        replays: Whether a joining worker catches up while the others train. In a loop with `LogicalShards`, it runs the
            loop with the others' results. In a DDP loop, it repeats the others' optimizer steps before its own loop. If
            False, the others wait while the worker receives the state. A loop with `LogicalShards` that calls
            collectives or inspects `batches` requires False. Default: True.
        others: All other objects with state, by name, such as the optimizer, the scheduler and the loader.

    Raises:
        TypeError: An object in `others` lacks `state_dict` or `load_state_dict`.
        ValueError: The DistributedDataParallel or its loader has an option that requires a fixed set of ranks, or an
            object in `others` is a SharedModelOptimizer or has the name "epoch".

    Example::

        paceline.init_process_group(elastic=True)
        shards = paceline.LogicalShards(model, 8)
        loader = paceline.ShardLoader(dataset, batch_size=4, shards=shards)
        state = paceline.ElasticState(shards, optimizer=optimizer, loader=loader)
        for epoch in state.epochs(20):
            for batches in loader:
                optimizer.zero_grad()
                shards.backward(lambda xy: loss_function(model(xy[0]), xy[1]), batches)
                optimizer.step()

    The DDP loop::

        model = paceline.DistributedDataParallel(model)
        loader = paceline.StatefulLoader(dataset, batch_size=8)
        state = paceline.ElasticState(model, optimizer=optimizer, loader=loader)
        for epoch in state.epochs(20):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_function(model(inputs), targets).backward()
                optimizer.step()
    """

    def __init__(
        self,
        model: LogicalShards | DistributedDataParallel | DiLoCo,
        *,
        on_view: Callable[[ViewChange], None] | None = None,
        replays: bool = True,
        **others: Stateful,
    ) -> None:
        if "epoch" in others:
            raise ValueError("ElasticState got epoch=, which is its own name for the number of the epoch; use another")
        if not isinstance(getattr(model, "module", None), torch.nn.Module):
            raise TypeError(
                f"ElasticState: model is a {type(model).__name__}; it must be a LogicalShards, a "
                "DistributedDataParallel or a DiLoCo, which holds the module"
            )
        _require_own_parameters(model.module, others)
        GRADIENT_USE.follow()
        self._model = model
        self._loop = _loop_of(model, {**others, "epoch": self})
        self._on_view = on_view
        self._replays = replays
        self._epoch = 0
        self._registry = self._loop.registry
        self._rounds: Rounds | None = None

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._epoch

    @property
    def is_replaying(self) -> bool:
        """Whether this worker joined late and the loop uses results that others computed earlier.

        The others have already produced the side effects of these steps, such as log output.
        """
        return self._rounds is not None and self._rounds.is_replaying

    @property
    def rounds(self) -> Rounds | None:
        """The rounds that this worker runs with the others, or None outside `epochs` or without an elastic launcher."""
        return self._rounds

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the current one up to `count` (exclusive).

        The iterator ends when all workers have finished these epochs.

        Raises:
            DivergenceError: The workers' results or states differ, and there is no majority.
            SystemExit: This worker was asked to leave, or the launcher dismissed it.
        """
        connection = LauncherConnection.of_environment()
        if connection is not None:
            self._join(connection)
        else:
            self._report(ViewChange(1, ("0",), ()))
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1
        if self._rounds is not None:
            self._rounds.finish()

    def skip_batch(self) -> None:
        """Participates in the other workers' step without this worker's samples.

        In a DDP loop, call this instead of backward. Afterward, the gradients are the mean over the others' samples,
        and `optimizer.step()` must follow as usual. If all workers skip the batch, the gradients from before the
        forward pass are restored. After `optimizer.zero_grad()` these are None, and the optimizer does nothing. The
        skipped samples are not repeated in this epoch.

        Raises:
            TypeError: The loop uses `LogicalShards`, which need every shard, or `DiLoCo`.
        """
        if isinstance(self._model, LogicalShards):
            raise TypeError("skip_batch() was called in a loop of LogicalShards, whose steps need every shard")
        if isinstance(self._model, DiLoCo):
            raise TypeError("skip_batch() was called in a loop of DiLoCo, whose steps are each worker's own")
        self._model.skip_batch()

    def digest(self) -> str:
        """Returns the SHA-256 digest of the state as 64 hexadecimal digits, equal on every worker.

        The state consists of the module's parameters and persistent buffers by name, and the `state_dict` of all other
        objects, including the epoch; gradients and random number generators are excluded. The digest covers the dtype,
        shape and elements of each tensor and the values of everything else. It does not depend on the order of keys or
        the kind of container. The digest does not change if a checkpoint is saved and loaded on any number of workers,
        or if the state is transferred to a joining worker.
        """
        return self._registry.digest()

    def parts(self) -> dict[str, Any]:
        """Returns the parts of a checkpoint by name: "model", all other objects, and the pending gradients.

        With DiLoCo, there are no pending gradients. The checkpoint then contains the outer parameters, from which each
        worker's own parameters start.
        """
        others = {name: other for name, other in self._registry.stateful.items() if other is not self}
        if not isinstance(self._model, DiLoCo):
            others[_PENDING] = PendingGradients(self._model.module)
        return {"model": self._model, **others}

    def state_dict(self) -> dict[str, int]:
        """Returns the current epoch."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the epoch in `state`."""
        self._epoch = state["epoch"]

    def _join(self, connection: LauncherConnection) -> None:
        failpoints.arm(connection.name, os.environ.get(failpoints.VARIABLE, ""))
        rounds = self._rounds = self._loop.rounds(connection, self._begin_batch)
        if threading.current_thread() is threading.main_thread():
            _leave_on_sigterm(connection, rounds)
        rounds.join(self._loop.fingerprint(), replays=self._replays and self._loop.can_catch_up)

    def _begin_batch(self) -> None:
        assert self._rounds is not None
        self._report(self._rounds.begin_batch())

    def _report(self, change: ViewChange | None) -> None:
        if change is not None and self._on_view is not None:
            self._on_view(change)


def _loop_of(
    model: LogicalShards | DistributedDataParallel | DiLoCo, others: Mapping[str, Stateful]
) -> LogicalShardsLoop | DdpLoop | DilocoLoop:
    if isinstance(model, DiLoCo):
        return DilocoLoop(model, others)
    return LogicalShardsLoop(model, others) if isinstance(model, LogicalShards) else DdpLoop(model, others)


def _require_own_parameters(module: nn.Module, others: Mapping[str, Stateful]) -> None:
    found = [name for name, other in others.items() if isinstance(other, SharedModelOptimizer)]
    if found or is_shared(module):
        given = f"{found[0]}=SharedModelOptimizer" if found else "the model of a SharedModelOptimizer"
        raise ValueError(
            f"ElasticState got {given}, with which all workers of a host share the parameters: a worker that dies "
            "in the middle of a step would leave them half updated for those that survive. Use the optimizer itself, "
            "so that every worker has its own parameters"
        )


def _leave_on_sigterm(connection: LauncherConnection, rounds: Rounds) -> None:
    """Treats the first SIGTERM as a request to leave after the current batch; a second one terminates the process."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        rounds.leave()
        connection.send(LeaveNotice("SIGTERM"))

    signal.signal(signal.SIGTERM, leave)
