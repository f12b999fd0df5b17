"""Collectives whose result has the shape of the argument: all-reduce, broadcast and barrier.

Calls are matched by their order, as everywhere in Paceline, and not by `name`; ranks whose names or shapes differ at
one place of that order get an error that names both sides. Gradients are Horovod's: a sum or average reduces the
gradients in the same way, and a broadcast averages them on the root.

Horovod's names of reductions, and what they are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Function

from paceline.comm.engine.codes import ReduceOp
from paceline.comm.functional import applied
from paceline.comm.group.collectives.coalesced import all_reduce_coalesced
from paceline.comm.group.collectives.collectives import broadcast as broadcast_into
from paceline.comm.group.default import default_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.interop.horovod.basics import ProcessSet, global_process_set
from paceline.interop.horovod.call_queue import CallHandle, CallKind, CallRequest
from paceline.interop.horovod.compression import Compression, Compressor

Average = ReduceOp.AVG
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = "Adasum"  # has a name only, so that scripts that offer it as an option run without it

Op = ReduceOp | str


def reduction(op: Op | None, average: bool | None = None) -> ReduceOp:
    """Returns the reduction that a call asks for, by `op` or by Horovod's older argument `average`.

    Raises:
        ValueError: both are given.
        NotImplementedError: `op` is Adasum.
    """
    if average is not None:
        if op is not None:
            raise ValueError("allreduce got both op and average, which is the older form of op; give it op only")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise NotImplementedError(
            f"the reduction {op} is not available in paceline.interop.horovod: Adasum adds gradients pairwise with weights "
            "that depend on their angle, which Paceline's engines do not compute; use op=Average, with a learning rate "
            "that fits the number of ranks"
        )
    return op


Result = TypeVar("Result")


@dataclass(frozen=True)
class ScaledReduction:
    """A reduction, and the factors before and after it.

    Integers are multiplied in float64 and rounded towards zero, as in Horovod.
    """

    by: ReduceOp
    before: float
    after: float

    def of(self, size: int) -> ScaledReduction:
        """Returns the same with one division for `size` ranks where an average would be multiplied again."""
        if self.by is Average and self.after != 1.0:
            return ScaledReduction(Sum, self.before, self.after / size)
        return self

    def __str__(self) -> str:
        """Returns what all ranks' calls must have in common."""
        factors = (("prescale_factor", self.before), ("postscale_factor", self.after))
        return ", ".join([f"op={self.by.name}", *(f"{name}={value!r}" for name, value in factors if value != 1.0)])


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiplies a tensor in place; integers in float64, and rounded towards zero."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def reduction_request(
    tensors: Sequence[torch.Tensor],
    how: ScaledReduction,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[], Result],
) -> CallRequest[Result]:
    """Returns the call that reduces tensors in place and then returns what `finish` does."""
    listed = [tensor.detach() for tensor in tensors]  # they share the memory of `tensors`
    merged = how.of(process_set.size())

    def run(group: ProcessGroup) -> Result:
        for tensor in listed:
            scale_(tensor, merged.before)
        all_reduce_coalesced(listed, merged.by, group)
        for tensor in listed:
            scale_(tensor, merged.after)
        return finish()

    return CallRequest(CallKind.ALLREDUCE, listed, run, str(how), name, merged.by)


class _Allreduce(Function):
    """Reduces copies of tensors over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, how: ScaledReduction, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns new tensors."""
        ctx.how, ctx.process_set = how, process_set
        copies = _copies(tensors)
        process_set.calls().perform(reduction_request(copies, how, name, process_set, lambda: None))
        if how.by not in (Sum, Average):
            ctx.save_for_backward(*tensors)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients, reduced in the same way; those of a product or an extreme are the true ones."""
        if ctx.how.by in (Sum, Average):
            return None, None, None, *_reduced(ctx.how, None, ctx.process_set, grads)
        summed = _reduced(replace(ctx.how, by=Sum), None, ctx.process_set, grads)
        slopes = [
            reduction_derivative(tensor * ctx.how.before, ctx.how.by, ctx.process_set) for tensor in ctx.saved_tensors
        ]
        return None, None, None, *(grad * each for grad, each in zip(summed, slopes, strict=True))


def reduction_derivative(mine: torch.Tensor, by: ReduceOp, process_set: ProcessSet) -> torch.Tensor:
    """Returns the derivative of a product, minimum or maximum of the ranks' tensors with respect to this rank's."""
    if by is Product:
        everybodys = torch.stack([torch.ones_like(mine)] * process_set.size())
        everybodys[process_set.rank()] = mine
        (everybodys,) = _reduced(ScaledReduction(Product, 1.0, 1.0), None, process_set, [everybodys])
        return torch.cat([everybodys[: process_set.rank()], everybodys[process_set.rank() + 1 :]]).prod(0)
    (extreme,) = _reduced(ScaledReduction(by, 1.0, 1.0), None, process_set, [mine])
    is_mine = (mine == extreme).to(mine.dtype)
    (holders,) = _reduced(ScaledReduction(Sum, 1.0, 1.0), None, process_set, [is_mine])
    return is_mine / holders


def _reduced(
    how: ScaledReduction, name: str | None, process_set: ProcessSet, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return outputs_of(_Allreduce, how, name, process_set, *tensors)


def outputs_of(function: type[Function], *arguments: object) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that `function.apply` returns, which torch leaves untyped."""
    return cast(tuple[torch.Tensor, ...], function.apply(*arguments))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CallHandle[torch.Tensor]:
    """Starts to reduce `tensor` over the ranks in place, and returns a handle. The default is the average.

    Raises:
        ValueError: a call with this name is under way.
    """
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    return CallHandle(process_set.calls(), reduction_request([tensor], how, name, process_set, lambda: tensor))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CallHandle[list[torch.Tensor]]:
    """Starts to reduce several tensors in place as one call, and returns a handle."""
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    return CallHandle(process_set.calls(), reduction_request(tensors, how, name, process_set, lambda: list(tensors)))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CallHandle[torch.Tensor]:
    """Starts to reduce a copy of `tensor` over the ranks, and returns a handle."""
    (copy,) = _copies([tensor])
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
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    (reduced,) = _reduced(how, name, process_set, [compressed])
    return compression.decompress(reduced, ctx)


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
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    return process_set.calls().perform(reduction_request([tensor], how, name, process_set, lambda: tensor))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CallHandle[list[torch.Tensor]]:
    """Starts to reduce copies of several tensors as one call, and returns a handle."""
    return grouped_allreduce_async_(_copies(tensors), average, name, op, prescale_factor, postscale_factor, process_set)


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
    """Returns the reductions of several tensors over the ranks, made as one call. Gradients flow through it."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    reduced = _reduced(how, name, process_set, [tensor for tensor, _ in pairs])
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
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    return process_set.calls().perform(reduction_request(tensors, how, name, process_set, lambda: list(tensors)))


def _broadcasting(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> CallRequest[torch.Tensor]:
    detached = tensor.detach()

    def run(group: ProcessGroup) -> torch.Tensor:
        broadcast_into(detached, root_rank, group)
        return tensor

    return CallRequest(CallKind.BROADCAST, [detached], run, f"root_rank={root_rank}", name)


class _Broadcast(Function):
    """Copies the root's tensor to every rank."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        (copy,) = _copies([tensor])
        return process_set.calls().perform(_broadcasting(copy, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the mean of the ranks' gradients on the root, and zeros elsewhere."""
        (mean,) = _reduced(ScaledReduction(Average, 1.0, 1.0), None, ctx.process_set, [grad])
        return mean if default_group().rank() == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[torch.Tensor]:
    """Starts to copy the root's `tensor` into that of every rank, and returns a handle.

    Raises:
        ValueError: a broadcast with this name is under way.
    """
    return CallHandle(process_set.calls(), _broadcasting(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[torch.Tensor]:
    """Starts to copy the root's `tensor` to every rank, and returns a handle."""
    (copy,) = _copies([tensor])
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the root's `tensor` on every rank. Gradients flow through it: the root's is the mean of the ranks'."""
    return applied(_Broadcast, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copies the root's `tensor` into that of every rank, and returns it."""
    return process_set.calls().perform(_broadcasting(tensor, root_rank, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called it. It does not wait for asynchronous calls that are under way."""
    process_set.calls().barrier()


def join(device: int = -1) -> int:
    """Waits until all ranks have called it, and returns the rank that called it last, the same on every rank.

    A rank that waits contributes zeros to the others' all-reduces, those of `DistributedOptimizer` included, and is
    counted in their averages. So ranks may have different numbers of batches. The others' barriers do not wait for it,
    and their further calls, such as `allgather` and `broadcast`, raise a `CollectiveMismatchError` meanwhile.

    Args:
        device: the number of the CUDA device for the zeros, if tensors are on GPUs.
    """
    return global_process_set.calls().join(device)
