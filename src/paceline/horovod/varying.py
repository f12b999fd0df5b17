"""Collectives whose ranks may have different numbers of rows: all-gather, all-to-all and reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import functional
from paceline.group.collectives import all_gather, all_to_all_single
from paceline.group.process_group import ProcessGroup
from paceline.horovod.calls import allreduce_async
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.handles import Handle, synchronize
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, Op

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts to concatenate all ranks' tensors by their first dimension, and returns a handle.

    The numbers of rows, which may differ, are exchanged before this returns; the ranks wait for each other there.
    """
    group = process_set.group()
    rows = _rows(tensor, group, "allgather")
    padded = _padded(tensor.detach(), max(rows))
    parts = [torch.empty_like(padded) for _ in rows]
    work = all_gather(parts, padded, group, async_op=True)
    return Handle(work, lambda: _joined(parts, rows))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns all ranks' tensors concatenated in rank order; all dimensions but the first must agree.

    Gradients flow through it.

    Raises:
        ValueError: the tensor has no dimensions.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return synchronize(allgather_async(tensor, name, process_set))
    group = process_set.group()
    rows = _rows(tensor, group, "allgather")
    return _joined(functional.all_gather(_padded(tensor, max(rows)), group), rows)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Returns what `allgather` returns for each of the tensors."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Received]:
    """Starts to send rows of `tensor` to each rank, and returns a handle.

    Args:
        tensor: its rows are divided among the ranks.
        splits: how many rows each rank gets; by default all get as many. If it is given, the result is a pair of the
            rows received and their numbers by rank.
        name: is not used.
        process_set: the ranks that take part.

    Raises:
        ValueError: the rows cannot be divided evenly, or `splits` does not fit them.
    """
    group = process_set.group()
    sent = _splits(tensor, splits, group)
    received = torch.empty(group.size(), dtype=torch.int64)
    all_to_all_single(received, torch.tensor(sent), group=group)
    output = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    work = all_to_all_single(output, tensor.detach().contiguous(), received.tolist(), sent, group, async_op=True)
    return Handle(work, lambda: output if splits is None else (output, received))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Received:
    """Sends rows of `tensor` to each rank, and returns what this rank received; see `alltoall_async`."""
    return synchronize(alltoall_async(tensor, splits, name, process_set))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Starts to reduce `tensor` over the ranks, and returns a handle whose result is this rank's share of the rows.

    The rows are divided as evenly as they can be; the first ranks get one more.
    """
    group = process_set.group()
    share, more = divmod(len(tensor), group.size())
    start = group.rank() * share + min(group.rank(), more)
    stop = start + share + (group.rank() < more)
    whole = allreduce_async(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    return Handle(whole.work, lambda: whole.result()[start:stop].clone())


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction of `tensor` over the ranks; see `reducescatter_async`."""
    compressed, ctx = compression.compress(tensor)
    handle = reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(synchronize(handle), ctx)


def _rows(tensor: torch.Tensor, group: ProcessGroup, call: str) -> list[int]:
    """Returns how many rows each rank has."""
    if tensor.dim() == 0:
        raise ValueError(f"{call} on rank {group.rank()} got a tensor without dimensions; give it one: tensor[None]")
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    all_gather(counts, torch.tensor([len(tensor)]), group)
    return [int(count) for count in counts]


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor.contiguous()


def _joined(parts: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, group: ProcessGroup) -> list[int]:
    if splits is not None:
        given = [int(each) for each in splits]
        if len(given) != group.size() or sum(given) != len(tensor):
            raise ValueError(
                f"alltoall on rank {group.rank()} got splits {given} for {len(tensor)} rows and {group.size()} ranks; "
                "it takes one number of rows for each rank, which add up to all rows"
            )
        return given
    share, rest = divmod(len(tensor), group.size())
    if rest:
        raise ValueError(
            f"alltoall on rank {group.rank()} got {len(tensor)} rows, which {group.size()} ranks cannot share evenly; "
            "give it splits"
        )
    return [share] * group.size()
