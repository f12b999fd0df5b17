"""Collectives whose result has the shape of the argument: all-reduce, broadcast and barrier.

Horovod's `name` is accepted and not used: calls are matched by their order, as everywhere in Paceline, and a call that
does not fit fails with an error that names both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline import functional
from paceline.group.barriers import barrier as wait_for_all
from paceline.group.coalesced import all_reduce_coalesced
from paceline.group.collectives import all_gather_into_tensor
from paceline.group.rooted import broadcast as broadcast_into
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.handles import Handle, synchronize
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Op, reduction


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts to reduce `tensor` over the ranks in place, and returns a handle. The default is the average."""
    handle = grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return Handle(handle.work, lambda: handle.result()[0])


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts to reduce several tensors in place as one call, and returns a handle."""
    by, group = reduction(op, average), process_set.group()
    listed = [tensor.detach() for tensor in tensors]  # they share the memory of `tensors`
    _scale(listed, prescale_factor)
    work = all_reduce_coalesced(listed, by, group, async_op=True)

    def finish() -> list[torch.Tensor]:
        _scale(listed, postscale_factor)
        return list(tensors)

    return Handle(work, _once(finish))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts to reduce a copy of `tensor` over the ranks, and returns a handle."""
    copy = tensor.detach().clone()
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the reduction of `tensor` over the ranks, by default the average. Gradients flow through it.

    Raises:
        ValueError: `op` is Adasum, or `average` is given as well.
        PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: as for `paceline.all_reduce`.
    """
    compressed, ctx = compression.compress(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        reduced = functional.all_reduce(compressed * prescale_factor, reduction(op, average), process_set.group())
        return compression.decompress(reduced * postscale_factor, ctx)
    handle = allreduce_async(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(synchronize(handle), ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks in place, and returns it."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts to reduce copies of several tensors as one call, and returns a handle."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns the reductions of several tensors over the ranks, made as one call."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    handle = grouped_allreduce_async(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced = synchronize(handle)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors over the ranks in place as one call, and returns them."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts to copy the root's `tensor` into that of every rank, and returns a handle."""
    work = broadcast_into(tensor.detach(), root_rank, process_set.group(), async_op=True)
    return Handle(work, lambda: tensor)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts to copy the root's `tensor` to every rank, and returns a handle."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's `tensor` on every rank. Gradients flow through it."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return functional.broadcast(tensor, root_rank, process_set.group())
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copies the root's `tensor` into that of every rank, and returns it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called it."""
    wait_for_all(process_set.group())


def join(device: int = -1) -> int:
    """Waits until all ranks have called it, and returns the rank that called it last.

    All ranks have to have made the same calls before: a rank that waits here does not take part in the others'
    all-reduces, as it would in Horovod. Where ranks have different numbers of batches, the call of another rank fails
    with a `CollectiveMismatchError`; use `paceline.DistributedDataParallel.join` or a sampler that evens them out.

    Args:
        device: is not used.
    """
    group = global_process_set.group()
    mine = torch.tensor([time.time_ns()])
    everybodys = torch.empty(group.size(), dtype=torch.int64)
    all_gather_into_tensor(everybodys, mine, group)
    return int(everybodys.argmax())


def _scale(tensors: Sequence[torch.Tensor], factor: float) -> None:
    if factor != 1.0:
        for tensor in tensors:
            tensor.mul_(factor)


def _once(finish: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """Returns a function that finishes once, however often a handle is synchronized."""
    results: list[list[torch.Tensor]] = []

    def result() -> list[torch.Tensor]:
        if not results:
            results.append(finish())
        return results[0]

    return result
