"""Gradients that do not depend on how many ranks compute them, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import require_same_module
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.conditions import rank_facts
from paceline.parallel.ddp.module import DistributedDataParallel
from paceline.parallel.sharded.streams import random_stream
from paceline.parallel.sharded.sums import Values, add, add_over_ranks, pack, unpack
from paceline.parallel.sharded.tree import Node, add_up, nodes_within, run_of_rank
from paceline.parallel.tracked_tensors import collect_tracked

_TRAINING = 2  # the purpose of a random stream; `loader` has the others


class Batch(Protocol):
    """What `ShardLoader` yields for a shard."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The epoch, the step and the shard."""

    @property
    def weight(self) -> float:
        """This batch's fraction of the step's samples."""

    @property
    def data(self) -> Any:
        """The data that the loss is computed from."""


class LogicalShards:
    """Cuts every step into `count` shards and adds their gradients in an order that does not depend on ranks.

    Each shard has its own forward and backward, with its own random numbers (dropout) and with
    normalisation over that shard; losses, gradients and changes of buffers (running statistics) are added in a pairwise
    tree over the shards. So parameters have the same bits after training on 1, 2 or 4 ranks, or any other number up
    to `count`. Powers of two that divide `count` move no more bytes than an all-reduce; others move more, and share
    the work unevenly where they do not divide it.

    The kind of CPU, the version of torch and its number of threads must be the same too; the latter is set for this
    process.

    Args:
        module: the model, not in a wrapper, the same on every rank; rank 0's parameters and buffers are copied to all.
        count: the number of shards, at least the number of ranks.
        seed: the seed of all random streams; the same on every rank.
        process_group: the ranks; None for the default group.
        threads: torch's threads: 1 or, for fewer ranks with more cores each, a number to be kept in all runs.

    Raises:
        CollectiveMismatchError: the model or these arguments differ between ranks; on every rank.
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
        self._module = module
        self._whole: list[torch.Tensor] = []
        options: dict[str, object] = {"count": count, "seed": seed, "threads": threads}
        require_same_module(collect_tracked(module), options, rank_facts(self._group, False), None, self._group)
        broadcast_tensors([*module.parameters(), *module.buffers()], self._group)
        torch.set_num_threads(threads)

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradient of the mean loss over the step's samples, and adds it to the parameters' gradients.

        Args:
            loss_of: returns the mean loss over a batch's samples, as a scalar, given the batch's data.
            batches: one for each of this rank's shards that has samples.

        Returns:
            The mean loss, which is the same on every rank, as are the gradients.
        """
        params = [param for param in self._module.parameters() if param.requires_grad]
        buffers = list(self._module.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        earlier = [param.grad for param in params]
        by_shard = {batch.key[2]: batch for batch in batches}

        def value_of(shard: int) -> Values:
            return self._compute(loss_of, by_shard.get(shard), params, buffers, before)

        size = self._group.size()
        runs = [run_of_rank(self.count, size, rank) for rank in range(size)]
        nodes = nodes_within(self.mine, Node(0, self.count))
        sums = {node: add_up(node, add, value_of, {}) for node in nodes}
        total = {
            dtype: add_over_ranks({node: sums[node][dtype] for node in nodes}, self.count, self._group, runs)
            for dtype in sums[nodes[0]]
        }
        like = [torch.zeros(()), torch.zeros(len(params)), *params, *filter(torch.is_floating_point, before)]
        loss, found, *rest = unpack(total, like)
        for param, gradient, old, times in zip(params, rest, earlier, found.tolist(), strict=False):
            new = torch.empty_like(param, requires_grad=False).copy_(gradient) if times else None
            param.grad = old if new is None else new if old is None else old.add_(new)
        self._update(buffers, before, rest[len(params) :])
        return loss.clone()

    def _compute(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Batch | None,
        params: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> Values:
        """Returns a shard's loss, which parameters have gradients, the gradients, and the changes of its buffers."""
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        for param in params:
            param.grad = None
        loss = torch.zeros(())
        if batch is not None:
            with random_stream(self.seed, _TRAINING, *batch.key):
                loss = loss_of(batch.data) * batch.weight
                loss.backward()
        found = torch.tensor([float(param.grad is not None) for param in params])
        gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        weight = 0.0 if batch is None else batch.weight
        changes = [
            torch.where(after == value, 0, after - value).mul_(weight)
            for after, value in zip(buffers, before, strict=True)
            if after.is_floating_point()
        ]
        if batch is not None and batch.key[2] == 0:
            self._whole = [buffer.clone() for buffer in buffers if not buffer.is_floating_point()]
        return pack([loss.detach().float(), found, *gradients, *changes], self._group.size())

    def _update(
        self, buffers: Sequence[torch.Tensor], before: Sequence[torch.Tensor], changes: Sequence[torch.Tensor]
    ) -> None:
        """Adds the shards' mean change to floating-point buffers; takes the others from shard 0, on rank 0."""
        floating = [(b, old) for b, old in zip(buffers, before, strict=True) if b.is_floating_point()]
        for (buffer, old), change in zip(floating, changes, strict=True):
            buffer.copy_(old + change)
        whole = [buffer for buffer in buffers if not buffer.is_floating_point()]
        for buffer, value in zip(whole, self._whole, strict=False):
            buffer.copy_(value)
        if whole:
            broadcast_tensors(whole, self._group)
