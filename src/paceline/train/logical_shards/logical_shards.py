"""LogicalShards: training and evaluation whose results are bitwise equal on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from paceline.comm.group.default import default_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import STEPS, RecordedSpan
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.logical_shards.shard_batches import (
    EVALUATION,
    TRAINING,
    Batch,
    ShardBatch,
    StepBatches,
    random_stream,
)
from paceline.train.logical_shards.tree_sum import (
    Node,
    Values,
    add,
    add_up,
    gradient_or_zeros,
    laid_out_as,
    nodes_within,
    run_of_rank,
    sum_over_ranks,
)
from paceline.train.module_tensors import accelerators_of, broadcast_tensors, collect_tracked
from paceline.train.preconditions import rank_facts, require_same_module
from paceline.train.training_events import record_optimizers

Measure = Callable[[Any], torch.Tensor]


class EvaluationLoader(Protocol):
    """A loader that an evaluation can read, such as `ShardLoader`."""

    def whole_epoch(self) -> Iterator[StepBatches]:
        """Yields all steps of an epoch, the same one in each call."""
        ...


class Sums(Protocol):
    """An object that adds up the values of all shards."""

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Returns the sum over all shards in the tree's order.

        Args:
            value_of: a function that computes the value of a shard.
            is_step: whether the sum is the gradient of a training step.
        """
        ...


class LogicalShards:
    """Divides every step into `count` shards, and adds their gradients in an order that is independent of the ranks.

    Each shard has its own forward and backward, with its own random numbers (for example for dropout) and with
    normalization over its own samples. Losses, gradients and changes of buffers (running statistics) are added in a
    pairwise tree over the shards. Training on 1, 2 or 4 ranks, or any other number up to `count`, therefore gives
    bitwise equal parameters. If the number of ranks is a power of two that divides `count`, no more bytes are sent than
    by an all-reduce. Otherwise more bytes are sent, and the work is divided unevenly if the number does not divide
    `count`.

    The model of the CPU or GPU, the version of torch and its number of threads must be the same too; the constructor
    sets the number of threads for this process. On a GPU, `torch.use_deterministic_algorithms(True)` is needed as well,
    since the order of additions varies in some of its kernels. Every shard also has its own random stream on a GPU, so
    dropout does not depend on the number of ranks there either.

    Args:
        module: the unwrapped model, the same on every rank; rank 0's parameters and buffers are copied to all.
        count: the number of shards, at least the number of ranks.
        seed: the seed of all random streams; the same on every rank.
        process_group: the ranks; None for the default group.
        threads: the number of threads that torch uses, the same in all runs; more than 1 suits few ranks with many
            cores.
        checks: whether gradients and replicas are checked, as for `DistributedDataParallel`.

    Raises:
        CollectiveMismatchError: the model or these arguments differ between ranks; raised on every rank.
        TypeError: the module is in a `DistributedDataParallel`.
        ValueError: there are fewer shards than ranks.

    Example::

        shards = paceline.LogicalShards(model, 8)
        for batches in paceline.ShardLoader(dataset, batch_size=4, shards=shards):
            optimizer.zero_grad()
            loss = shards.backward(lambda xy: loss_function(model(xy[0]), xy[1]), batches)
            optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        count: int,
        *,
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        threads: int = 1,
        checks: bool | int | None = None,
    ) -> None:
        self._group = default_group() if process_group is None else process_group
        rank, size = self._group.rank(), self._group.size()
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "LogicalShards got a DistributedDataParallel, which averages over ranks; give it the module inside"
            )
        if count < size:
            raise ValueError(
                f"rank {self._group.ranks[rank]}: {count} shards cannot be shared by {size} ranks; "
                "use a count that is at least the largest number of ranks you train on"
            )
        self.count = count
        self.seed = seed
        self.mine = run_of_rank(count, size, rank)
        self.module = module
        self._sums: Sums = GroupSums(count, self._group)
        self._on_batch: Callable[[], None] = _nothing
        chosen = choose_checks(checks)
        options: dict[str, object] = {"count": count, "seed": seed, "threads": threads, "checks": str(chosen)}
        tracked = collect_tracked(module)
        require_same_module(tracked, options, rank_facts(self._group, False), None, self._group)
        self._checks = ModuleChecks(module, tracked, self._group, chosen, with_buffers=True)
        broadcast_tensors([*module.parameters(), *module.buffers()], self._group)
        torch.set_num_threads(threads)
        record_optimizers()

    def sum_by(self, sums: Sums, on_batch: Callable[[], None]) -> None:
        """Delegates the sum over shards to `sums`; a loader then calls `on_batch` before each batch."""
        self._sums, self._on_batch = sums, on_batch
        self._checks.allow_differences()  # the members of an elastic job vote on their state

    @property
    def _device(self) -> torch.device:
        """The device of the first parameter, on which losses are added."""
        first = next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def begin_batch(self) -> None:
        """Prepares the next batch or the end of an epoch; loaders call it."""
        self._on_batch()

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradient of the mean loss over the step's samples, and adds it to the parameters' gradients.

        Args:
            loss_of: a function from a batch's data to the mean loss over its samples, a scalar.
            batches: the batch of each of this rank's shards that has samples.

        Returns:
            The mean loss. It is the same on every rank, as are the gradients.
        """
        STEPS.begin(self, "shards")
        named = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
        params = list(named.values())
        buffers = list(self.module.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        earlier = [param.grad for param in params]
        of_shard = _reader(batches)

        def value_of(shard: int) -> Values:
            values = self._compute(loss_of, of_shard(shard), shard, params, buffers, before)
            self._checks.look_at(list(named), values[2 : 2 + len(params)])
            return values

        total = self._sums.total(value_of, is_step=True)
        loss, found, *rest = total
        for param, gradient, old, times in zip(params, rest, earlier, found.tolist(), strict=False):
            new = laid_out_as(param, gradient) if times else None
            param.grad = old if new is None else new if old is None else old.add_(new)
        self._update(buffers, before, rest[len(params) :])
        self._checks.end(rest[: len(params)])
        return loss.to(self._device, copy=True)

    def evaluate(self, measure: Measure, loader: EvaluationLoader) -> torch.Tensor:
        """Returns the sum of `measure` over all batches of `loader`, in evaluation mode and without gradients.

        Each sample counts once, and the result is bitwise equal on all ranks and for every number of ranks.

        Args:
            measure: a function from a batch's data to a sum over its samples, such as the number of correct answers: a
                tensor, whose shape, dtype and device are the same for each batch.
            loader: a separate `ShardLoader` of these shards, with shuffle=False.

        Raises:
            ValueError: the loader is in the middle of an epoch, or has fewer samples than there are shards.

        Example::

            test = paceline.ShardLoader(test_set, batch_size=64, shards=shards, shuffle=False)
            correct = shards.evaluate(lambda xy: (model(xy[0]).argmax(1) == xy[1]).sum(), test)
        """
        sums = ShardSums(measure, self.seed, accelerators_of(self.module))
        with evaluating(self.module):
            sums.add_up(loader.whole_epoch())
            (total,) = self._sums.total(sums.value_of)
            return total

    def _compute(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Batch | None,
        shard: int,
        params: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> Values:
        """Returns a shard's loss, a flag for each gradient that exists, the gradients, and the changes of buffers."""
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        for param in params:
            param.grad = None
        loss = torch.zeros((), device=self._device)
        if batch is not None:
            with random_stream(self.seed, TRAINING, *batch.key, devices=accelerators_of(self.module)):
                with RecordedSpan(EventKind.FORWARD, "shards", shard):
                    loss = loss_of(batch.data) * batch.weight
                with RecordedSpan(EventKind.BACKWARD, "shards", shard):
                    loss.backward()
        found = torch.tensor([float(param.grad is not None) for param in params], device="cpu")
        gradients = [gradient_or_zeros(param, param.grad) for param in params]
        weight = 0.0 if batch is None else batch.weight
        changes = [
            _change(after, value, weight) if after.is_floating_point() else _of_first_shard(after, shard)
            for after, value in zip(buffers, before, strict=True)
        ]
        return [loss.detach().to(self._device, torch.float32).reshape(()), found, *gradients, *changes]

    @staticmethod
    def _update(
        buffers: Sequence[torch.Tensor], before: Sequence[torch.Tensor], changes: Sequence[torch.Tensor]
    ) -> None:
        """Adds the shards' mean change to floating-point buffers, and copies other buffers from shard 0."""
        for buffer, old, change in zip(buffers, before, changes, strict=True):
            buffer.copy_(old + change.to(buffer.device) if buffer.is_floating_point() else change)


class GroupSums:
    """The sum over `count` shards, of which each rank of `group` computes a consecutive run."""

    def __init__(self, count: int, group: ProcessGroup) -> None:
        self._count, self._group = count, group

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Returns the sum over all shards."""
        size = self._group.size()
        root = Node(0, self._count)
        nodes = [nodes_within(run_of_rank(self._count, size, rank), root) for rank in range(size)]
        mine = {node: add_up(node, add, value_of, {}) for node in nodes[self._group.rank()]}
        return sum_over_ranks(mine, nodes, self._count, self._group, in_place=True)


class ShardSums:
    """The sum of `measure` over the batches of each shard, for an evaluation.

    Args:
        measure: a function from a batch's data to a tensor, whose shape, dtype and device are the same for each batch.
        seed: the seed of the random streams.
        devices: the devices whose generators draw from these streams, besides the CPU's.
    """

    def __init__(self, measure: Measure, seed: int, devices: Sequence[torch.device] = ()) -> None:
        self._measure, self._seed, self._devices = measure, seed, devices
        self._steps: list[StepBatches] = []
        self._sums: dict[int, torch.Tensor] = {}

    def add_up(self, steps: Iterator[StepBatches]) -> None:
        """Adds up the batches of this rank's shards."""
        for batches in steps:
            for batch in batches:
                self._add(batch)
            self._steps.append(batches.without_data())

    def value_of(self, shard: int) -> Values:
        """Returns the sum of a shard, reading its batches if they belong to another rank."""
        if shard not in self._sums:
            for batches in self._steps:
                if (batch := batches.of(shard)) is not None:
                    self._add(batch)
        return [self._sums[shard].clone()]

    def _add(self, batch: ShardBatch) -> None:
        with random_stream(self._seed, EVALUATION, *batch.key, devices=self._devices):
            value = self._measure(batch.data).detach()
        shard = batch.key[2]
        self._sums[shard] = self._sums[shard] + value if shard in self._sums else value.clone()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Returns a context in which `module` is in evaluation mode and no gradients are computed."""
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _nothing() -> None:
    """Does nothing; the default callback."""


def _change(after: torch.Tensor, before: torch.Tensor, weight: float) -> torch.Tensor:
    """Returns a shard's share of the mean change of a buffer, which is zero for entries that stay infinite."""
    return torch.where(after == before, 0, after - before).mul_(weight)


def _of_first_shard(buffer: torch.Tensor, shard: int) -> torch.Tensor:
    """Returns the buffer on shard 0 and zeros on the others, so that the sum over all shards is that of shard 0."""
    summable = buffer.to(torch.uint8) if buffer.dtype is torch.bool else buffer
    return summable.clone() if shard == 0 else torch.zeros_like(summable)


def _reader(batches: Sequence[Batch]) -> Callable[[int], Batch | None]:
    """Returns a function from a shard to its batch, or to None if the shard has no samples in this step."""
    by_shard = {batch.key[2]: batch for batch in batches}
    return batches.of if isinstance(batches, StepBatches) else by_shard.get
