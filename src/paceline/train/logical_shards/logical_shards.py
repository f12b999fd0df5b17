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
from paceline.train.module_tensors import accelerators_of, broadcast_tensors, collect_tracked, mark_synchronized
from paceline.train.preconditions import rank_facts, require_same_module, require_unwrapped
from paceline.train.training_events import record_optimizers

Measure = Callable[[Any], torch.Tensor]


class EvaluationLoader(Protocol):
    """Interface for evaluation loaders, such as `ShardLoader`."""

    def whole_epoch(self) -> Iterator[StepBatches]:
        """Yields all steps of one epoch; every call yields the same steps."""
        ...


class Sums(Protocol):
    """Interface for objects that add up the values of all shards."""

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Returns the sum of `value_of` over all shards, in tree order; `is_step` if it contains a step's gradients."""
        ...


class LogicalShards:
    """Divides every step into `count` shards, and adds the shards' gradients in an order independent of the ranks.

    Each shard runs its own forward and backward passes, with its own random numbers (for example for dropout) and with
    normalization over its own samples. Losses, gradients and buffer updates (running statistics) are added in a
    pairwise tree over the shards. Training therefore produces bitwise equal parameters on any number of ranks up to
    `count`. If the number of ranks is a power of two that divides `count`, training sends no more bytes than an
    all-reduce does. With any other number of ranks, training sends more bytes, and unless the number divides `count`,
    the work is divided unevenly.

    For bitwise equal results, runs must also use the same CPU or GPU model, the same version of torch and the same
    number of threads, which the constructor sets for this process. GPU training additionally requires
    `torch.use_deterministic_algorithms(True)`, because the order of additions varies in some GPU kernels. Each shard
    also has a random stream on the GPU, so dropout does not depend on the number of ranks.

    Args:
        module: the unwrapped model, which must be the same on every rank. Rank 0's parameters and buffers are copied to
            all ranks.
        count: the number of shards, at least the number of ranks.
        seed: the seed for all random streams, which must be the same on every rank.
        process_group: the process group of the ranks; if None, the default group.
        threads: the number of threads that torch uses, which must be the same in all runs. Values above 1 are faster if
            there are few ranks and many cores.
        checks: whether gradients and replicas are checked; see `DistributedDataParallel`.

    Raises:
        CollectiveMismatchError: the model or these arguments differ between ranks; raised on every rank.
        TypeError: the module is wrapped in a `DistributedDataParallel`.
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
        require_unwrapped(module, "LogicalShards")
        if count < size:
            raise ValueError(
                f"rank {self._group.ranks[rank]}: {count} shards cannot be shared by {size} ranks; "
                "use a count that is at least the maximum number of ranks on which you train"
            )
        self.count = count
        self.seed = seed
        self.mine = run_of_rank(count, size, rank)
        self.module = module
        self._sums: Sums = GroupSums(count, self._group)
        self._on_batch: Callable[[], None] | None = None
        chosen = choose_checks(checks)
        options: dict[str, object] = {"count": count, "seed": seed, "threads": threads, "checks": str(chosen)}
        tracked = collect_tracked(module)
        require_same_module(tracked, options, rank_facts(self._group, False), None, self._group)
        self._checks = ModuleChecks(module, tracked, self._group, chosen, with_buffers=True)
        broadcast_tensors([*module.parameters(), *module.buffers()], self._group)
        mark_synchronized(self)
        torch.set_num_threads(threads)
        record_optimizers()

    def sum_by(self, sums: Sums, on_batch: Callable[[], None]) -> None:
        """Delegates the sum over shards to `sums`, and makes loaders call `on_batch` before each batch."""
        self._sums, self._on_batch = sums, on_batch
        self._checks.allow_differences()  # the members in an elastic job vote on their state

    @property
    def _device(self) -> torch.device:
        """The device of the first parameter; losses are added on this device."""
        first = next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def begin_batch(self) -> None:
        """Prepares the next batch or the end of an epoch; called by loaders."""
        if self._on_batch is not None:
            self._on_batch()

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradient of the mean loss over the step's samples and accumulates it into the parameters.

        Args:
            loss_of: a function that maps a batch's data to the scalar mean loss over its samples.
            batches: the batches of this rank's shards; shards without samples are omitted.

        Returns:
            The mean loss. The loss and the gradients are the same on every rank.
        """
        STEPS.begin(self, "shards")
        named = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
        params = list(named.values())
        buffers = list(self.module.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        earlier = [param.grad for param in params]
        by_shard = {batch.key[2]: batch for batch in batches}
        batch_of: Callable[[int], Batch | None] = batches.of if isinstance(batches, StepBatches) else by_shard.get

        def value_of(shard: int) -> Values:
            values = self._compute(loss_of, batch_of(shard), shard, params, buffers, before)
            self._checks.look_at(list(named), values[2 : 2 + len(params)])
            return values

        total = self._sums.total(value_of, is_step=True)
        loss, found, *rest = total
        for param, gradient, old, times in zip(params, rest, earlier, found.tolist(), strict=False):
            new = laid_out_as(param, gradient) if times else None
            param.grad = old if new is None else new if old is None else old.add_(new)
        for buffer, old, change in zip(buffers, before, rest[len(params) :], strict=True):
            # The sum of an integer or boolean buffer is the buffer of shard 0.
            buffer.copy_(old + change.to(buffer.device) if buffer.is_floating_point() else change)
        self._checks.end(rest[: len(params)])
        return loss.to(self._device, copy=True)

    def evaluate(self, measure: Measure, loader: EvaluationLoader) -> torch.Tensor:
        """Sums `measure` over all batches of `loader`, in evaluation mode and without gradients.

        Each sample is counted once. The result is bitwise equal on all ranks and for any number of ranks.

        Args:
            measure: a function that maps a batch's data to a sum over its samples, such as the number of correct
                answers. The sum is a tensor with the same shape, dtype and device for each batch.
            loader: a separate `ShardLoader` for these shards, with shuffle=False.

        Raises:
            ValueError: the loader is in the middle of an epoch, or there are fewer samples than shards.

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
        """Returns a shard's loss, a flag per parameter (1.0 if it has a gradient), gradients, and buffer updates."""
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


class GroupSums:
    """Adds up `count` shards, of which each rank in `group` computes a consecutive range."""

    def __init__(self, count: int, group: ProcessGroup) -> None:
        self._count, self._group = count, group

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Returns the sum over all shards, added in tree order."""
        size = self._group.size()
        root = Node(0, self._count)
        nodes = [nodes_within(run_of_rank(self._count, size, rank), root) for rank in range(size)]
        mine = {node: add_up(node, add, value_of, {}) for node in nodes[self._group.rank()]}
        return sum_over_ranks(mine, nodes, self._count, self._group, in_place=True)


class ShardSums:
    """Sums `measure` over the batches of each shard, for an evaluation.

    `devices` are those, other than the CPU, whose generators draw from the random streams.
    """

    def __init__(self, measure: Measure, seed: int, devices: Sequence[torch.device] = ()) -> None:
        self._measure, self._seed, self._devices = measure, seed, devices
        self._steps: list[StepBatches] = []
        self._sums: dict[int, torch.Tensor] = {}

    def add_up(self, steps: Iterator[StepBatches]) -> None:
        """Adds up the values of `measure` over the batches of this rank's shards."""
        for batches in steps:
            for batch in batches:
                self._add(batch)
            self._steps.append(batches.without_data())

    def value_of(self, shard: int) -> Values:
        """Returns the sum for a shard; if the shard belongs to another rank, reads its batches first."""
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


def _change(after: torch.Tensor, before: torch.Tensor, weight: float) -> torch.Tensor:
    """Returns a shard's weighted update of a buffer, which is zero for unchanged entries, even if they are infinite."""
    return torch.where(after == before, 0, after - before).mul_(weight)


def _of_first_shard(buffer: torch.Tensor, shard: int) -> torch.Tensor:
    """Returns the buffer for shard 0 and zeros for other shards, so that the sum equals shard 0's buffer."""
    summable = buffer.to(torch.uint8) if buffer.dtype is torch.bool else buffer
    return summable.clone() if shard == 0 else torch.zeros_like(summable)
