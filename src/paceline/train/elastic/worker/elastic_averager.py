"""The weighted mean of the members' gradients, and the assignment of batches, in an elastic DDP loop.

Each backward pass is a round (`rounds.py`). Each member contributes its weighted gradients, which no other member can
compute. If a member is lost, the mean covers the samples of the remaining members, and the lost member's samples are
repeated at the end of the epoch. All members commit the same result: the gradients, the buffers and the list of
participants, which determines the loader's position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.comm.engine.adapters.device_streams import record_current
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.data.epoch_order import RankSlot
from paceline.train.data.loader import StatefulLoader
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.worker.rounds import Rounds
from paceline.train.logical_shards.tree_sum import Flat, Values, lengths_of, unpack
from paceline.train.module_tensors import pinned_like, shares_memory


@dataclass(frozen=True)
class MeanContribution:
    """One member's contribution to a mean. The mean is computed out of place, so the computation can be repeated."""

    weight: float  # of the member's gradients; a weight of zero excludes them
    slot: RankSlot  # the member's slot in the batch
    batch: tuple[int, ...]  # numbers that identify the batch, equal on every member
    params: Sequence[torch.Tensor]  # the parameters whose gradients are averaged
    buffers: Sequence[torch.Tensor]  # all members copy those of the first member with a positive weight

    @property
    def accelerators(self) -> list[torch.device]:
        """The accelerators that hold parameters or buffers. The mean itself is computed in host memory."""
        devices = dict.fromkeys(tensor.device for tensor in (*self.params, *self.buffers))
        return [device for device in devices if device.type != "cpu"]


class WeightedMean(NamedTuple):
    """A weighted mean, whose tensors are views of a round's result."""

    counts: bool  # whether any member had a positive weight
    took_part: list[bool]  # for each slot of the batch, whether its member participated, even with a weight of zero
    has_gradient: list[bool]  # for each parameter, whether any member with a positive weight had a gradient
    gradients: list[torch.Tensor]  # the mean gradient of each parameter
    buffers: list[torch.Tensor]  # those of the first member with a positive weight


@torch.no_grad()
def mean_over(group: ProcessGroup | None, part: MeanContribution) -> Values:
    """Returns the mean over the members of `group`, or of this process alone, encoded for `read_mean`.

    Raises RuntimeError if the members are in different batches.
    """
    weights, rank = _exchange_weights(group, part)
    failpoint("mean.weighed")
    total = sum(weights)
    like = _layout(part)
    whole = _zeros(like, is_pinned=bool(part.accelerators))
    values = unpack(whole, like)
    flags, *rest = values
    slots = part.slot.ranks
    if part.slot.rank is not None:
        flags[part.slot.rank] = 1
    if part.weight > 0:
        flags[slots] = 1
        factor = part.weight / total
        for index, (param, view) in enumerate(zip(part.params, rest, strict=False)):
            if param.grad is None:
                continue
            flags[slots + 1 + index] = 1
            if param.grad.is_cpu:
                torch.mul(param.grad, factor, out=view)
            else:
                view.copy_(param.grad * factor, non_blocking=True)
        if all(weight == 0 for weight in weights[:rank]):
            for buffer, view in zip(part.buffers, rest[len(part.params) :], strict=True):
                view.copy_(buffer, non_blocking=True)
    for device in part.accelerators:
        record_current(device).wait()
    failpoint("round.computed")
    if group is not None:
        for flat in whole.values():
            group.all_reduce(flat)
    return values


def read_mean(values: Values, part: MeanContribution) -> WeightedMean:
    """Decodes the result of `mean_over`."""
    flags, *rest = values
    read_flags = [flag > 0 for flag in flags.tolist()]
    slots, params = part.slot.ranks, len(part.params)
    return WeightedMean(read_flags[slots], read_flags[:slots], read_flags[slots + 1 :], rest[:params], rest[params:])


def _exchange_weights(group: ProcessGroup | None, part: MeanContribution) -> tuple[list[float], int]:
    if group is None:
        return [part.weight], 0
    weight = torch.tensor([part.weight], dtype=torch.float64, device="cpu").view(torch.int64)
    mine = torch.cat([weight, torch.tensor(part.batch, dtype=torch.int64, device="cpu")])
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(everyones, mine)
    batches = [tuple(numbers[1:].tolist()) for numbers in everyones]
    if len(set(batches)) > 1:
        raise RuntimeError(
            f"rank {group.rank()}: the ranks average different backward passes; by rank, the epoch, the position in "
            "it, the number of repeated samples and the backward passes of this batch so far are "
            f"{', '.join(map(str, batches))}. In an elastic job every rank must call backward, or state.skip_batch(), "
            "equally often in every batch"
        )
    return [numbers[:1].view(torch.float64).item() for numbers in everyones], group.rank()


def _layout(part: MeanContribution) -> list[torch.Tensor]:
    """Returns meta tensors with the shapes and dtypes of the flags, gradients and buffers in a result."""
    flags = torch.empty(part.slot.ranks + 1 + len(part.params), dtype=torch.int64, device="meta")
    summable = {torch.bool: torch.uint8}
    buffers = [
        torch.empty_like(buffer, dtype=summable.get(buffer.dtype, buffer.dtype), device="meta")
        for buffer in part.buffers
    ]
    params = [torch.empty_like(param, device="meta") for param in part.params]
    return [flags, *params, *buffers]


def _zeros(like: Sequence[torch.Tensor], *, is_pinned: bool) -> Flat:
    flat = {kind: torch.empty(length, dtype=kind[0], device="meta") for kind, length in lengths_of(like).items()}
    if is_pinned:
        return {kind: pinned_like(memory).zero_() for kind, memory in flat.items()}
    return {kind: torch.zeros_like(memory, device="cpu") for kind, memory in flat.items()}


class ElasticAverager:
    """Averages the gradients of `model` over the members of each view, and divides the batches of `loader` among them.

    Before `average_by`, this process is the only member.
    """

    def __init__(self, model: DistributedDataParallel, loader: StatefulLoader[object]) -> None:
        self._model = model
        self._loader = loader
        self._rounds: Rounds | None = None
        self._name = ""
        self._on_batch: Callable[[], None] | None = None
        self._params, self._buffers_of = model.average_by(self)
        loader.use_batch_assigner(self)
        # - The current batch
        self._slot: RankSlot | None = None
        self._counts = True  # whether this rank's samples count; False if another rank has the same samples
        self._rounds_of_batch = 0
        # - The next backward pass
        self._weight = 1.0
        self._before: tuple[list[torch.Tensor | None], list[torch.Tensor]] | None = None  # saved gradients and buffers

    def average_by(self, rounds: Rounds, name: str, on_batch: Callable[[], None]) -> None:
        """Starts averaging in `rounds` under this worker's name; `on_batch` is called before each batch."""
        self._rounds, self._name, self._on_batch = rounds, name, on_batch

    # - Called by the loader

    def begin_batch(self) -> RankSlot:
        """Returns this rank's slot in the next batch."""
        if self._on_batch is not None:
            self._on_batch()
        self._rounds_of_batch = 0
        self._slot = RankSlot(1, 0)
        if self._rounds is not None:
            members = self._rounds.assignments.latest.members
            self._slot = RankSlot(len(members), members.index(self._name) if self._name in members else None)
        return self._slot

    def batch_delivered(self, *, counts: bool) -> None:
        """Records whether this rank's samples in the batch count."""
        self._counts = counts
        failpoint("batch.dealt")

    def end_batch(self) -> None:
        """Raises RuntimeError if the batch had no backward pass, or if the pass left parameters without a gradient."""
        if self._rounds_of_batch == 0:
            self._model.require_averaged()
            raise RuntimeError(
                f"worker {self._name or '0'}: the loop continued with the next batch, but the last one had no "
                "backward, for which the other ranks wait. Call state.skip_batch() instead of backward, and then "
                "optimizer.step() like the other ranks"
            )

    # - Called by the module

    def set_weight(self, weight: float) -> None:
        """Sets the weight of this rank's next backward pass; raises ValueError if it is negative or not finite."""
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"worker {self._name or '0'}: weight is {weight}; it must be finite and not negative")
        self._weight = float(weight)

    def before_forward(self) -> None:
        """Saves the gradients and buffers, which are restored if every member's weight is zero."""
        if self._before is None:
            gradients = [None if param.grad is None else param.grad.clone() for param in self._params]
            self._before = gradients, [buffer.clone() for buffer in self._buffers_of()]

    def average(self) -> None:
        """Replaces the gradients with the mean over the members."""
        self._run(self._weight if self._counts else 0.0)

    def skip(self) -> None:
        """Replaces the gradients with the mean over the other members."""
        self._run(0.0)

    @torch.no_grad()
    def _run(self, weight: float) -> None:
        self._weight = 1.0
        if self._slot is None:
            raise RuntimeError(
                f"worker {self._name or '0'}: backward was called before the loop over the StatefulLoader began; an "
                "elastic job averages only within it"
            )
        batch = (*self._loader.place(), self._rounds_of_batch)
        part = MeanContribution(weight, self._slot, batch, self._params, self._buffers_of())
        if self._rounds is None:
            values = mean_over(None, part)
        else:
            values = self._rounds.agree_on(lambda group: mean_over(group, part))
        mean = read_mean(values, part)
        if self._rounds_of_batch == 0:
            self._loader.return_samples_of(rank for rank, took_part in enumerate(mean.took_part) if not took_part)
        self._rounds_of_batch += 1
        self._apply(mean, part)
        failpoint("mean.applied")

    def _apply(self, mean: WeightedMean, part: MeanContribution) -> None:
        before, self._before = self._before, None
        if not mean.counts:
            if before is not None:
                gradients, buffers = before
                for param, gradient in zip(part.params, gradients, strict=True):
                    param.grad = gradient
                _copy_all(part, buffers)
            return
        for param, value, has_gradient in zip(part.params, mean.gradients, mean.has_gradient, strict=True):
            if not has_gradient:
                param.grad = None
            elif param.grad is None or (shares_memory(param.grad) and not param.grad._is_view()):
                param.grad = torch.empty_like(param).copy_(value, non_blocking=True)
            else:
                param.grad.copy_(value, non_blocking=True)
        _copy_all(part, mean.buffers)


def _copy_all(part: MeanContribution, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(part.buffers, values, strict=True):
        buffer.copy_(value, non_blocking=True)
