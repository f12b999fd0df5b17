"""The weighted mean of the members' gradients, in which each member has one value that nobody can compute again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.data.rest import Seat
from paceline.elastic.failpoints import reach
from paceline.group.process_group import ProcessGroup
from paceline.parallel.sharded.sums import Flat, Values, unpack


@dataclass(frozen=True)
class Part:
    """What one member contributes to a mean; the mean is computed out of place, so that it may be computed again.

    Attributes:
        weight: the weight of its gradients; with zero they do not count, whatever they are.
        seat: its seat in the batch.
        batch: numbers that name the batch, and are the same on every member.
        params: the parameters, whose gradients are meant.
        buffers: those of the module, which everybody takes over from the first member that counts.
    """

    weight: float
    seat: Seat
    batch: tuple[int, ...]
    params: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


class Mean(NamedTuple):
    """A mean as its views on the result of a round.

    Attributes:
        counts: whether any member counted.
        took_part: for each seat of the batch, whether its member took part, counted or not.
        has_gradient: for each parameter, whether any member that counted had a gradient.
        gradients: for each parameter, the mean.
        buffers: the first counting member's.
    """

    counts: bool
    took_part: list[bool]
    has_gradient: list[bool]
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]


@torch.no_grad()
def mean_over(group: ProcessGroup | None, part: Part) -> Values:
    """Returns the mean over the members of `group`, or of this process alone; `read` makes sense of it.

    Raises:
        RuntimeError: the members are in different batches, which the message shows.
    """
    weights, rank = _exchange_weights(group, part)
    reach("mean.weighed")
    total = sum(weights)
    like = _layout(part)
    whole = _zeros(like)
    values = unpack(whole, like)
    flags, *rest = values
    seats = part.seat.ranks
    if part.seat.rank is not None:
        flags[part.seat.rank] = 1
    if part.weight > 0:
        flags[seats] = 1
        factor = part.weight / total
        for at, (param, view) in enumerate(zip(part.params, rest, strict=False)):
            if param.grad is not None:
                flags[seats + 1 + at] = 1
                torch.mul(param.grad, factor, out=view)
        if all(weight == 0 for weight in weights[:rank]):
            for buffer, view in zip(part.buffers, rest[len(part.params) :], strict=True):
                view.copy_(buffer)
    reach("round.computed")
    if group is not None:
        for flat in whole.values():
            group.all_reduce(flat)
    return values


def read(values: Values, part: Part) -> Mean:
    """Returns the mean that a result holds."""
    flags, *rest = values
    read_flags = [each > 0 for each in flags.tolist()]
    seats, params = part.seat.ranks, len(part.params)
    return Mean(read_flags[seats], read_flags[:seats], read_flags[seats + 1 :], rest[:params], rest[params:])


def _exchange_weights(group: ProcessGroup | None, part: Part) -> tuple[list[float], int]:
    if group is None:
        return [part.weight], 0
    weight = torch.tensor([part.weight], dtype=torch.float64).view(torch.int64)
    mine = torch.cat([weight, torch.tensor(part.batch, dtype=torch.int64)])
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(everyones, mine)
    batches = [tuple(each[1:].tolist()) for each in everyones]
    if len(set(batches)) > 1:
        raise RuntimeError(
            f"rank {group.rank()}: the ranks average different backwards; by rank, the epoch, the position in it, "
            f"the samples that come again and the backwards of this batch so far are {', '.join(map(str, batches))}. "
            "In an elastic job every rank must call backward, or state.skip_batch(), equally often in every batch"
        )
    return [each[:1].view(torch.float64).item() for each in everyones], group.rank()


def _layout(part: Part) -> list[torch.Tensor]:
    """Returns tensors of the shapes and dtypes of a result: flags, gradients and buffers."""
    flags = torch.empty(part.seat.ranks + 1 + len(part.params), dtype=torch.int64, device="meta")
    buffers = [torch.empty_like(each, dtype=_summable(each.dtype), device="meta") for each in part.buffers]
    return [flags, *part.params, *buffers]


def _zeros(like: Sequence[torch.Tensor]) -> Flat:
    lengths: dict[torch.dtype, int] = {}
    for tensor in like:
        lengths[tensor.dtype] = lengths.get(tensor.dtype, 0) + tensor.numel()
    return {dtype: torch.zeros(length, dtype=dtype) for dtype, length in lengths.items()}


def _summable(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype is torch.bool else dtype
