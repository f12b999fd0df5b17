"""What a training loop needs in order to go on when workers die, leave or join.

The two kinds of training loops: in logical shards, and the usual one with a `DistributedDataParallel`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from paceline.train.data.loader import StatefulLoader
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.diloco.diloco import DiLoCo
from paceline.train.elastic import failpoints
from paceline.train.elastic.protocol import Leaving
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks
from paceline.train.elastic.worker.agreement import ViewChange
from paceline.train.elastic.worker.diloco_loop import DilocoLoop
from paceline.train.elastic.worker.elastic_averager import ElasticAverager
from paceline.train.elastic.worker.launcher_connection import LauncherConnection, same_bits_as
from paceline.train.elastic.worker.rounds import Rounds
from paceline.train.elastic.worker.training_state import PendingGradients, Stateful, TrainingState
from paceline.train.gradient_use import GRADIENT_USE
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.shared_model.shared_model_optimizer import SharedModelOptimizer
from paceline.train.shared_model.shared_parameters import is_shared


class TrainingLoop(Protocol):
    """What differs between the loops.

    Attributes: `can_catch_up`, whether a worker that comes late can catch up while the others train.
    """

    can_catch_up: bool

    def registry(self, others: dict[str, Stateful]) -> TrainingState:
        """Returns the state of the module and of the others."""
        ...

    def rounds(self, connection: LauncherConnection, registry: TrainingState, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that add up the loop's gradients from now on; `on_batch` is called before each batch."""
        ...

    def fingerprint(self) -> str:
        """Returns what must be equal on two workers that train together."""
        ...


class LogicalShardsLoop:
    """The loop in logical shards: the bits of its results do not depend on the workers."""

    can_catch_up = True

    def __init__(self, shards: LogicalShards) -> None:
        self._shards = shards

    def registry(self, others: dict[str, Stateful]) -> TrainingState:
        """Returns the state of the module and of the others."""
        return TrainingState(self._shards.module, others)

    def rounds(self, connection: LauncherConnection, registry: TrainingState, on_batch: Callable[[], None]) -> Rounds:
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


class DdpLoop:
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
        self.can_catch_up = False
        self._model = model
        self._on_batch: Callable[[], None] | None = None
        self._averaging = ElasticAverager(model, self._loader, self._begin_batch)

    def registry(self, others: dict[str, Stateful]) -> TrainingState:
        """Returns the state of the module and of the others."""
        registry = TrainingState(self._model.module, others, is_replicated=False)
        self.can_catch_up = bool(registry.optimizers)
        return registry

    def rounds(self, connection: LauncherConnection, registry: TrainingState, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that average the module's gradients from now on."""
        rounds = Rounds(1, connection, registry, lambda _: None, OptimizerStepHooks(registry.optimizers))
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


_PENDING = "pending gradients"  # no name that `ElasticState` can be given


class ElasticState:
    """Keeps the state of a training run through the deaths, departures and arrivals of workers.

    The loop is that of `LogicalShards` with `ShardLoader`, or the usual one of `DistributedDataParallel` with
    `StatefulLoader` (see below). When a worker dies in the middle of a step, the others
    compute its shards of that step and go on; none of them is restarted. A worker that comes late runs the script from
    the top, is given the state in `epochs`, and takes part from the next step on. Since a step depends on the number of
    shards and not on that of workers, the results have the same bits as those of one process that nothing disturbed.

    Start the script with `paceline run --elastic`. Started without, it is a job of this one process.

    What the script does before `epochs` it does on each worker by itself, since a worker that comes late has nobody to
    do it with: the default process group has one rank until then. Between taking a batch from the loader and calling
    `shards.backward` nothing may change the state; schedulers step after the optimizer. A loop that is resumed in the
    middle of an epoch runs the lines before the loader's `for` again.

    In the usual loop the others finish the step with the mean over their own samples, and the samples of the worker
    that died come again at the end of the epoch: no step is lost, and each sample is used once. The bits depend on who
    died when. Each batch has a backward, or `skip_batch`, on every worker.

    Args:
        model: the logical shards, which hold the model, or the model in a DistributedDataParallel, or a DiLoCo.
        on_view: is called with a `ViewChange` at the beginning of the first batch that other workers train on than the
            one before, with the same arguments on every worker, so that it may change learning rates.
        replays: a worker that comes late catches up while the others train. It runs the loop of `LogicalShards` on
            their results, or makes the steps of their optimizers before the usual loop. With False they wait while it
            gets the state. A loop of `LogicalShards` with collectives of its own, or one that looks into `batches`,
            needs False.
        others: everything else that has a state, by name: the optimizer, the scheduler, the loader, ....

    Raises:
        TypeError: one of the others has no state_dict and load_state_dict.
        ValueError: the DistributedDataParallel or its loader was made with an option that needs ranks which stay, or
            one of the others is a SharedModelOptimizer or named epoch.

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

    The usual loop::

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
        _require_own_parameters(model.module, others)
        GRADIENT_USE.follow()
        self._model = model
        self._loop = _loop_of(model, others.values())
        self._on_view = on_view
        self._replays = replays
        self._epoch = 0
        self._registry = self._loop.registry({**others, "epoch": self})
        self._rounds: Rounds | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._epoch

    @property
    def is_replaying(self) -> bool:
        """Whether the loop runs on results that others have computed before, since this worker came late.

        Whatever a step leaves outside of the state, such as a line in a log, the others have left already.
        """
        return self._rounds is not None and self._rounds.is_replaying

    @property
    def rounds(self) -> Rounds | None:
        """The rounds that the workers agree on; None outside of `epochs`, and in a job of this one process."""
        return self._rounds

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the current one to before `count`, and returns when all workers have finished them.

        Raises:
            DivergenceError: workers that should have the same results have not.
            SystemExit: this worker was asked to leave, or the launcher has no use for it.
        """
        connection = LauncherConnection.of_environment()
        if connection is not None:
            self._join(connection)
        else:
            self._tell(ViewChange(1, ("0",), ()))
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1
        if self._rounds is not None:
            self._rounds.finish()

    def skip_batch(self) -> None:
        """Takes part in the other workers' step without this worker's samples; in the usual loop, instead of backward.

        The gradients are the mean over the samples of the others afterwards, and `optimizer.step()` must follow as
        always. If all workers skip the batch, the gradients are as they were before the forward, which is None after
        `optimizer.zero_grad()`, so that the optimizer does nothing. The samples do not come again in this epoch.

        Raises:
            TypeError: the loop is that of `LogicalShards`, in which every shard counts, or of `DiLoCo`.
        """
        if isinstance(self._model, LogicalShards):
            raise TypeError("skip_batch() was called in a loop of LogicalShards, whose steps need every shard")
        if isinstance(self._model, DiLoCo):
            raise TypeError("skip_batch() was called in a loop of DiLoCo, whose steps are each worker's own")
        self._model.skip_batch()

    def digest(self) -> str:
        """Returns the SHA-256 of the state, as 64 hexadecimal digits; it is the same on every worker.

        The state is the module's parameters and persistent buffers by name, and the `state_dict` of everything else,
        the epoch among it; gradients and random generators are left out. Only values count: a tensor's type, shape and
        elements, and the values of all else, but neither the order of keys nor the kind of container. Whoever loads a
        checkpoint, on any number of workers, and a worker that joins have the digest of the state that was saved.
        """
        return self._registry.digest()

    def parts(self) -> dict[str, Any]:
        """Returns the model as "model", everything else that was given by its name, and the pending gradients.

        With DiLoCo there are none: a checkpoint has the outer parameters, and the workers' own begin from these.
        """
        others = {name: each for name, each in self._registry.stateful.items() if each is not self}
        if not isinstance(self._model, DiLoCo):
            others[_PENDING] = PendingGradients(self._model.module)
        return {"model": self._model, **others}

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the current epoch."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the epoch of `state`."""
        self._epoch = state["epoch"]

    def _join(self, connection: LauncherConnection) -> None:
        failpoints.arm_by_environment(connection.name)
        rounds = self._rounds = self._loop.rounds(connection, self._registry, self._begin_batch)
        if threading.current_thread() is threading.main_thread():
            _leave_on_sigterm(connection, rounds)
        rounds.join(self._loop.fingerprint(), replays=self._replays and self._loop.can_catch_up)

    def _begin_batch(self) -> None:
        assert self._rounds is not None
        self._tell(self._rounds.begin_batch())

    def _tell(self, change: ViewChange | None) -> None:
        if change is not None and self._on_view is not None:
            self._on_view(change)


def _loop_of(model: LogicalShards | DistributedDataParallel | DiLoCo, others: Collection[Stateful]) -> TrainingLoop:
    if isinstance(model, DiLoCo):
        return DilocoLoop(model, others)
    return LogicalShardsLoop(model) if isinstance(model, LogicalShards) else DdpLoop(model, others)


def _require_own_parameters(module: nn.Module, others: Mapping[str, Stateful]) -> None:
    found = [f"{name}=SharedModelOptimizer" for name, each in others.items() if isinstance(each, SharedModelOptimizer)]
    if is_shared(module):
        found.append("the model of a SharedModelOptimizer")
    if found:
        raise ValueError(
            f"ElasticState got {found[0]}, with which all workers of a host share the parameters: a worker that dies "
            "in the middle of a step would leave them half updated for those that live. Use the optimizer itself, so "
            "that every worker has parameters of its own"
        )


def _leave_on_sigterm(connection: LauncherConnection, rounds: Rounds) -> None:
    """Makes the first SIGTERM a request to leave at the end of the batch, and the second one final."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        rounds.leave()
        connection.send(Leaving("SIGTERM"))

    signal.signal(signal.SIGTERM, leave)
