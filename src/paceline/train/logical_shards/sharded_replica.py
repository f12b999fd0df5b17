"""ShardedReplica: divides a rank's forward and backward passes into logical shards, for any training loop.

With n ranks, `DistributedSampler` assigns the samples r, r + n, r + 2n, ... of a step to rank r. This module assigns
the samples s, s + count, s + 2 count, ... to shard s, and the shards r, r + n, ... to rank r. A shard's samples are
therefore the same for every n. Gradients are added in a tree that first splits the shards by the lowest bit of their
numbers. In this tree, the shards of each rank form a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.comm.group.eager import Compiler, compiled_by, eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.autograd_graph import NO_BACKWARD, in_backward, running_backward
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.data_parallel import concatenate, map_tensors
from paceline.train.logical_shards.shard_batches import FORWARD, random_stream
from paceline.train.logical_shards.tree_sum import (
    Node,
    Values,
    add,
    add_up,
    gradient_or_zeros,
    laid_out_as,
    sum_over_ranks,
)
from paceline.train.module_tensors import TrackedTensors, accelerators_of, broadcast_tensors


@dataclass(eq=False)
class _Forward:
    """The state that a forward pass keeps for its backward pass."""

    reduces: bool  # whether the backward pass averages the gradients
    params: list[list[torch.Tensor]] = field(default_factory=list)  # copies, for each of this rank's shards
    changes: list[list[torch.Tensor]] = field(default_factory=list)  # of the floating-point buffers, for each shard
    whole: list[torch.Tensor] = field(default_factory=list)  # the other buffers after the first shard's forward pass
    is_reduced: bool = False  # whether the gradients have been averaged


class ShardedReplica:
    """Calls `module` once for each of this rank's shards and averages the gradients over all shards.

    Args:
        module: the module, which must be the same on every rank.
        tracked: the module's tensors.
        count: the number of shards, a power of two that is at least the number of ranks.
        seed: the seed for the shards' random streams.
        dim: the batch dimension of inputs and outputs.
        group: the process group of the ranks, whose number must be a power of two.
        checks: the checks for gradients and replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        tracked: TrackedTensors,
        count: int,
        seed: int,
        dim: int,
        group: ProcessGroup,
        checks: ModuleChecks,
    ):
        size = group.size()
        if count < size or count & (count - 1) or size & (size - 1):
            raise ValueError(
                f"rank {group.me.rank}: logical_shards is {count} with {size} ranks; both must be powers of two, and "
                "no more ranks than shards. LogicalShards supports other numbers"
            )
        if tracked.sparse:
            raise TypeError(
                f"parameter {min(tracked.sparse)!r} has sparse gradients, which are not added in a fixed order; create "
                "its layer with sparse=False, or leave deterministic=True out"
            )
        self._module, self._tracked = module, tracked
        self._count, self._seed, self._dim, self._group = count, seed, dim, group
        self._checks = checks
        self._local = count // size
        self._forwards = 0
        self._waiting: list[_Forward] = []  # forward passes with a finished backward pass and unreduced gradients
        self._begun: list[_Forward] = []  # forward passes that the running backward pass has reached
        self._task = NO_BACKWARD  # autograd's task id of the running backward pass

    def __call__(
        self, args: Sequence[object], kwargs: Mapping[str, object], reduces: bool, compiler: Compiler = None
    ) -> object:
        """Runs the module on each shard of this rank's batch and concatenates the outputs.

        If `reduces` is False, the gradients accumulate until a later backward pass averages them.
        """
        if in_backward():
            raise RuntimeError(
                f"rank {self._group.me.rank}: the module was called inside a backward, as "
                "torch.utils.checkpoint does to compute it again; with deterministic=True that would draw other "
                "random numbers. Checkpoint layers inside the module, and not the wrapped module"
            )
        forward = _Forward(reduces)
        outputs = [self._call(shard, args, kwargs, forward, compiler) for shard in range(self._local)]
        self._forwards += 1
        return map_tensors(concatenate(outputs, None, self._dim), self._deal_back)

    def _call(
        self,
        shard: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        forward: _Forward,
        compiler: Compiler,
    ) -> object:
        params = {name: param.detach().requires_grad_() for name, param in self._tracked.trained.items()}
        # Every shard starts from the buffer values before this forward pass.
        buffers = {name: buffer.detach().clone() for name, buffer in self._tracked.buffers.items()}
        forward.params.append(list(params.values()))
        inputs: Any = map_tensors((tuple(args), dict(kwargs)), lambda tensor: self._deal_out(tensor, shard))
        number = shard * self._group.size() + self._group.rank()
        with random_stream(self._seed, FORWARD, self._forwards, number, devices=accelerators_of(self._module)):
            output = compiled_by(compiler, torch.func.functional_call, self._module, {**params, **buffers}, *inputs)
        changed = [(buffers[name], old) for name, old in self._tracked.buffers.items() if old.is_floating_point()]
        forward.changes.append([torch.where(new == old, 0, new - old) for new, old in changed])
        if shard == 0:
            forward.whole = [buffer.clone() for buffer in buffers.values() if not buffer.is_floating_point()]
        return map_tensors(output, lambda tensor: self._watch(tensor, forward))

    def _deal_out(self, tensor: torch.Tensor, shard: int) -> torch.Tensor:
        """Copies a shard's samples into contiguous memory, because kernel results may depend on the layout."""
        if tensor.dim() <= self._dim:
            return tensor
        samples = tensor.shape[self._dim]
        if samples % self._local:
            raise ValueError(
                f"rank {self._group.me.rank}: a batch of {samples} samples cannot be divided among the {self._local} "
                f"shards of a rank; use a batch_size that {self._local} divides, and drop_last=True"
            )
        apart: torch.Tensor = tensor.unflatten(self._dim, (samples // self._local, self._local))
        return apart.select(self._dim + 1, shard).clone(memory_format=torch.contiguous_format)

    def _deal_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorders samples from shard order to batch order."""
        if tensor.dim() <= self._dim or self._local == 1:
            return tensor
        by_shard: torch.Tensor = tensor.unflatten(self._dim, (self._local, tensor.shape[self._dim] // self._local))
        return by_shard.transpose(self._dim, self._dim + 1).flatten(self._dim, self._dim + 1)

    def _watch(self, tensor: torch.Tensor, forward: _Forward) -> torch.Tensor:
        @eager
        def begin(gradient: torch.Tensor) -> torch.Tensor:
            if forward.is_reduced:
                raise RuntimeError(
                    f"rank {self._group.me.rank}: a second backward of one forward; with "
                    "deterministic=True its gradients were averaged after the first. Call the module again"
                )
            task = running_backward()
            if task != self._task:
                self._task = task
                self._begun = []  # a backward pass that failed may have left entries
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            if forward not in self._begun:
                self._begun.append(forward)
            return gradient.clone(memory_format=torch.contiguous_format)

        if tensor.requires_grad:
            tensor.register_hook(begin)
        return tensor

    @eager
    def _end(self) -> None:
        """Averages the gradients at the end of a backward pass that reached a forward pass with `reduces=True`."""
        self._task = NO_BACKWARD
        begun = [
            forward
            for forward in self._begun
            if any(param.grad is not None for params in forward.params for param in params)
        ]
        self._waiting += [forward for forward in begun if forward not in self._waiting]
        if any(forward.reduces for forward in begun):
            ready, self._waiting = self._waiting, []
            self._reduce(ready)

    @torch.no_grad()
    def _reduce(self, forwards: Sequence[_Forward]) -> None:
        rank, size = self._group.rank(), self._group.size()
        firsts = [_reversed_bits(number, size) * self._local for number in range(size)]

        def value_of(leaf: int) -> Values:
            return self._values(forwards, _reversed_bits(leaf - firsts[rank], self._local))

        nodes = [[Node(first, first + self._local)] for first in firsts]
        node = nodes[rank][0]
        mine = {node: add_up(node, add, value_of, {})}
        total = sum_over_ranks(mine, nodes, self._count, self._group, in_place=True)
        params = list(self._tracked.trained.values())
        floating = [buffer for buffer in self._tracked.buffers.values() if buffer.is_floating_point()]
        found, *rest = total
        for param, gradient, times in zip(params, rest, found.tolist(), strict=False):
            if times:
                new = laid_out_as(param, gradient).div_(size)
                param.grad = new if param.grad is None else param.grad.add_(new)
        for buffer, change in zip(floating, rest[len(params) :], strict=True):
            buffer.add_(change / self._count)
        whole = [buffer for buffer in self._tracked.buffers.values() if not buffer.is_floating_point()]
        for buffer, value in zip(whole, forwards[-1].whole, strict=True):
            buffer.copy_(value)
        if whole:
            broadcast_tensors(whole, self._group)  # rank 0 has the first shard
        self._checks.end(rest[: len(params)])
        for forward in forwards:
            forward.is_reduced = True
            forward.params.clear()

    def _values(self, forwards: Sequence[_Forward], shard: int) -> Values:
        """Returns a shard's values: a flag per parameter (1.0 if it has a gradient), gradients, and buffer updates."""
        params = list(self._tracked.trained.values())
        gradients: list[torch.Tensor | None] = [None] * len(params)
        for forward in forwards:
            for index, param in enumerate(forward.params[shard]):
                old, new = gradients[index], param.grad
                gradients[index] = old if new is None else new if old is None else old + new
        self._checks.look_at(list(self._tracked.trained), gradients)
        changes = [
            torch.stack(of_buffer).sum(0) for of_buffer in zip(*(f.changes[shard] for f in forwards), strict=True)
        ]
        found = torch.tensor([float(gradient is not None) for gradient in gradients], device="cpu")
        return [found, *map(gradient_or_zeros, params, gradients), *changes]


def _reversed_bits(number: int, count: int) -> int:
    """Reverses the bit order of a number below `count`, a power of two."""
    bits = count.bit_length() - 1
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
