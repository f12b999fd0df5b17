"""Collectives that gather, exchange or scatter rows. The number of rows may differ between ranks.

Gradients are defined as in Horovod. The backward pass of `allgather` averages the gradients over the ranks. The
backward pass of `alltoall` returns them to the senders of the rows. The backward pass of `reducescatter` gathers them
and, for a sum, multiplies them by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from paceline.comm.group.collectives.coalesced import all_reduce_coalesced
from paceline.comm.group.collectives.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_to_all_single,
    reduce_scatter_tensor,
)
from paceline.comm.group.process_group import ProcessGroup
from paceline.interop.horovod.basics import ProcessSet, global_process_set
from paceline.interop.horovod.call_queue import CallHandle, CallKind, CallRequest, require_tensors
from paceline.interop.horovod.collectives import (
    Average,
    Compression,
    Compressor,
    Op,
    ScaledReduction,
    Sum,
    grouped_allreduce,
    outputs_of,
    reduction,
    scale_,
    times_derivatives,
)

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class GatheredTensors(NamedTuple):
    """Several tensors, each concatenated over all ranks; `rows[r][i]` is the number of rows of tensor i on rank r."""

    tensors: list[torch.Tensor]
    rows: list[list[int]]


def gather_rows(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> GatheredTensors:
    """Concatenates each tensor over all ranks in rank order. Runs on the thread that executes the call."""
    mine = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
    gathered = mine.new_empty((group.size(), len(mine)))
    all_gather_into_tensor(gathered, mine, group)
    rows: list[list[int]] = gathered.tolist()
    wholes = []
    for index, tensor in enumerate(tensors):
        counts = [of_rank[index] for of_rank in rows]
        padded = _padded(tensor, max(counts))
        parts = [torch.empty_like(padded) for _ in counts]
        all_gather(parts, padded, group)
        wholes.append(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
    return GatheredTensors(wholes, rows)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor.contiguous()


def _gather_request(
    tensors: Sequence[torch.Tensor], name: str | None, pick: Callable[[GatheredTensors], Any], call: str
) -> CallRequest[Any]:
    _require_rows(tensors, call)
    listed = [tensor.detach() for tensor in tensors]
    return CallRequest(CallKind.ALLGATHER, listed, lambda group: pick(gather_rows(listed, group)), "", name)


def _require_rows(tensors: Sequence[torch.Tensor], call: str) -> None:
    require_tensors(tensors, call)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{call} got a tensor without dimensions; add one: tensor[None]")


class _Allgather(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, call: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        request = _gather_request(tensors, name, lambda gathered: gathered, call)
        gathered: GatheredTensors = process_set.calls().perform(request)
        ctx.process_set, ctx.rows = process_set, gathered.rows
        return tuple(gathered.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Averages the gradients over the ranks and returns this rank's rows."""
        me = ctx.process_set.rank()
        mine = []
        for index, mean in enumerate(grouped_allreduce(grads, process_set=ctx.process_set)):
            start = sum(of_rank[index] for of_rank in ctx.rows[:me])
            mine.append(mean[start : start + ctx.rows[me][index]])
        return None, None, None, *mine


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[torch.Tensor]:
    """Starts a concatenation of the tensors from all ranks along their first dimension; returns a handle.

    Raises:
        ValueError: the tensor has no dimensions, or an all-gather with this name is pending.
    """
    request = _gather_request([tensor], name, lambda gathered: gathered.tensors[0], "allgather_async")
    return CallHandle(process_set.calls(), request)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the tensors from all ranks in rank order. All dimensions except the first must match.

    Differentiable: each rank receives the mean of all ranks' gradients with respect to its rows.

    Raises:
        ValueError: the tensor has no dimensions.
    """
    return outputs_of(_Allgather, name, process_set, "allgather", tensor)[0]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[list[torch.Tensor]]:
    """Starts `allgather` for several tensors in one call; returns a handle."""
    request = _gather_request(tensors, name, lambda gathered: gathered.tensors, "grouped_allgather_async")
    return CallHandle(process_set.calls(), request)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Performs `allgather` for several tensors in one call; returns a list of results."""
    return list(outputs_of(_Allgather, name, process_set, "grouped_allgather", *tensors))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Op, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts a sum or average of sparse tensors; returns a function that waits for the result and returns it.

    Args:
        tensor: A sparse COO tensor. The number of entries may differ between ranks.
        name: The call's name, as in `allreduce`.
        op: Sum or Average.
        process_set: The participating ranks.

    Raises:
        ValueError: the tensor is not a sparse COO tensor, or `op` is another reduction.
    """
    return CallHandle(process_set.calls(), sparse_allreduce_request(tensor, name, op, process_set)).result


def sparse_allreduce_request(
    tensor: torch.Tensor, name: str | None, op: Op, process_set: ProcessSet
) -> CallRequest[torch.Tensor]:
    """Returns the request for `sparse_allreduce_async`."""
    require_tensors([tensor], "sparse_allreduce_async")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async got a tensor of layout {tensor.layout}; it takes sparse COO tensors")
    by = reduction(op)
    if by not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async adds entries, so its op is Sum or Average; got {by.name}")
    detached = tensor.detach()
    entries, values = detached._indices().t().contiguous(), detached._values()

    def run(group: ProcessGroup) -> torch.Tensor:
        all_entries, all_values = gather_rows([entries, values], group).tensors
        if by is Average:
            all_values = all_values / group.size()
        return torch.sparse_coo_tensor(
            all_entries.t(), all_values, detached.shape, check_invariants=False, device=all_values.device
        )

    details = f"shape={list(detached.shape)}, op={by.name}"
    return CallRequest(CallKind.SPARSE_ALLREDUCE, [entries, values], run, details, name)


def _exchange_request(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> CallRequest[tuple[torch.Tensor, torch.Tensor]]:
    require_tensors([tensor], "alltoall")
    sent = _splits(tensor, splits, process_set)
    detached = tensor.detach().contiguous()
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

    def run(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.empty(group.size(), dtype=torch.int64, device="cpu")
        all_to_all_single(received, torch.tensor(sent, device="cpu"), group=group)
        output = detached.new_empty((int(received.sum()), *detached.shape[1:]))
        all_to_all_single(output, detached, received.tolist(), sent, group)
        return output, received.to(like)

    return CallRequest(CallKind.ALLTOALL, [detached], run, "", name)


class _Alltoall(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = process_set.calls().perform(_exchange_request(tensor, splits, name, process_set))
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        return alltoall(grad, ctx.received, process_set=ctx.process_set)[0], None, None, None


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CallHandle[tuple[torch.Tensor, torch.Tensor]]:
    """Starts sending rows of `tensor` to each rank; returns a handle.

    The result consists of the received rows and the number of rows from each rank.

    Args:
        tensor: The tensor whose rows are divided among the ranks.
        splits: The number of rows for each rank; by default, the rows are divided equally.
        name: The call's name. No other pending call may have the same name.
        process_set: The participating ranks.

    Raises:
        ValueError: the rows cannot be divided equally, or the sum of `splits` is not the number of rows.
    """
    return CallHandle(process_set.calls(), _exchange_request(tensor, splits, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Received:
    """Sends rows of `tensor` to each rank and returns the rows that this rank received. Differentiable.

    See `alltoall_async` for the arguments and errors. If `splits` is given, returns a pair: the received rows and the
    number of rows from each rank.
    """
    output, received = outputs_of(_Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _scatter_request(
    tensors: Sequence[torch.Tensor],
    how: ScaledReduction,
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[torch.Tensor]], Any],
    call: str,
) -> CallRequest[Any]:
    _require_rows(tensors, call)
    listed = [tensor.detach() for tensor in tensors]
    merged = how.of(process_set.size())

    def run(group: ProcessGroup) -> Any:
        shares = []
        for tensor in listed:
            whole = tensor.clone(memory_format=torch.contiguous_format)
            scale_(whole, merged.before)
            share = _share(whole, merged, group)
            scale_(share, merged.after)
            shares.append(share)
        return pick(shares)

    return CallRequest(CallKind.REDUCESCATTER, listed, run, str(how), name)


def _share(whole: torch.Tensor, how: ScaledReduction, group: ProcessGroup) -> torch.Tensor:
    """Reduces `whole` and returns this rank's rows; may overwrite `whole`. The first ranks may have one extra row."""
    rows, more = divmod(len(whole), group.size())
    if more == 0:
        share = whole.new_empty((rows, *whole.shape[1:]))
        reduce_scatter_tensor(share, whole, how.by, group)
        return share
    all_reduce_coalesced([whole], how.by, group)
    start = group.rank() * rows + min(group.rank(), more)
    return whole[start : start + rows + (group.rank() < more)].clone()


class _Reducescatter(Function):
    @staticmethod
    def forward(
        ctx: Any, how: ScaledReduction, name: str | None, process_set: ProcessSet, call: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how, ctx.process_set = how, process_set
        if how.by not in (Sum, Average):
            ctx.save_for_backward(*tensors)
        request = _scatter_request(tensors, how, name, process_set, tuple, call)
        shares: tuple[torch.Tensor, ...] = process_set.calls().perform(request)
        return shares

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gathers the gradients from all ranks and multiplies them by the reduction's factors."""
        factor = ctx.how.before * ctx.how.after * (ctx.process_set.size() if ctx.how.by is Sum else 1)
        gathered = grouped_allgather([grad * factor for grad in grads], None, ctx.process_set)
        if ctx.how.by not in (Sum, Average):
            gathered = times_derivatives(ctx, gathered)
        return None, None, None, None, *gathered


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CallHandle[torch.Tensor]:
    """Starts a reduction of `tensor` over the ranks; returns a handle whose result is this rank's share of the rows.

    The rows are divided as equally as possible; the first ranks may receive one more row than the others.

    Raises:
        ValueError: the tensor has no dimensions, or a reduce-scatter with this name is pending.
    """
    how = ScaledReduction(reduction(op), prescale_factor, postscale_factor)
    request = _scatter_request([tensor], how, name, process_set, lambda shares: shares[0], "reducescatter_async")
    return CallHandle(process_set.calls(), request)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks and returns this rank's share of the rows; see `reducescatter_async`.

    Differentiable: the backward pass gathers the gradients for all rows and, if `op` is Sum, multiplies them by the
    number of ranks.
    """
    compressed, ctx = compression.compress(tensor)
    how = ScaledReduction(reduction(op), prescale_factor, postscale_factor)
    (share,) = outputs_of(_Reducescatter, how, name, process_set, "reducescatter", compressed)
    return compression.decompress(share, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CallHandle[list[torch.Tensor]]:
    """Starts `reducescatter` for several tensors in one call; returns a handle."""
    how = ScaledReduction(reduction(op), prescale_factor, postscale_factor)
    request = _scatter_request(tensors, how, name, process_set, list, "grouped_reducescatter_async")
    return CallHandle(process_set.calls(), request)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Performs `reducescatter` for several tensors in one call; returns a list of results."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = ScaledReduction(reduction(op), prescale_factor, postscale_factor)
    compressed = [tensor for tensor, _ in pairs]
    shares = outputs_of(_Reducescatter, how, name, process_set, "grouped_reducescatter", *compressed)
    return [compression.decompress(share, ctx) for share, (_, ctx) in zip(shares, pairs, strict=True)]


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    me, size = process_set.calls().group.rank(), process_set.size()
    _require_rows([tensor], "alltoall")
    if splits is not None:
        if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.is_complex()):
            raise ValueError(f"alltoall on rank {me} got splits of type {splits.dtype}; numbers of rows are integers")
        given = [int(count) for count in splits]
        if len(given) != size or sum(given) != len(tensor) or min(given) < 0:
            raise ValueError(
                f"alltoall on rank {me} got splits {given} for {len(tensor)} rows and {size} ranks; it takes one "
                "number of rows for each rank, which add up to all rows"
            )
        return given
    share, rest = divmod(len(tensor), size)
    if rest:
        raise ValueError(
            f"alltoall on rank {me} got {len(tensor)} rows, which {size} ranks cannot share evenly; pass splits"
        )
    return [share] * size
