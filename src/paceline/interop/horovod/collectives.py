"""Shape-preserving collectives (all-reduce, broadcast), gradient compression, `barrier` and `join`.

Calls are matched across ranks by their order, not by `name`. A mismatch in names or shapes raises an error that lists
the calls of all ranks. Gradients are defined as in Horovod: the backward pass of a sum or average applies the same
reduction to the gradients, and the backward pass of a broadcast averages them on the root. Other functions broadcast
parameters, optimizer states and objects, or gather objects from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.autograd import Function

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.functional import applied
from paceline.comm.group.collectives.coalesced import all_reduce_coalesced, broadcast_coalesced
from paceline.comm.group.collectives.collectives import broadcast as broadcast_into
from paceline.comm.group.collectives.object_collectives import all_gather_object, broadcast_object_list
from paceline.comm.group.default import default_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.interop.horovod.basics import ProcessSet, global_process_set
from paceline.interop.horovod.call_queue import CallHandle, CallKind, CallRequest, require_tensors


class Compressor(Protocol):
    """Compresses a tensor before its reduction, and decompresses the result."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor to reduce instead of `tensor`, and the context for `decompress`."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the reduced tensor, converted to its original dtype."""


class NoneCompressor:
    """Leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor."""
        return tensor


class FP16Compressor:
    """Reduces floating-point tensors in float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Converts floating-point tensors to float16; returns other tensors unchanged."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor, converted to its original dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The available compressors: `Compression.none` and `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor


Average = ReduceOp.AVG
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = "Adasum"  # not supported; defined for scripts that offer it as an option

Op = ReduceOp | str


def reduction(op: Op | None, average: bool | None = None) -> ReduceOp:
    """Returns the reduction selected by `op` or by Horovod's older argument `average`."""
    if average is not None:
        if op is not None:
            raise ValueError("allreduce got both op and average, which is the older form of op; pass only op")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise NotImplementedError(
            f"the reduction {op} is not available in paceline.horovod: Adasum adds gradients pairwise with weights "
            "that depend on their angle, which Paceline's engines do not compute; use op=Average, with a learning rate "
            "that fits the number of ranks"
        )
    return op


Result = TypeVar("Result")


@dataclass(frozen=True)
class ScaledReduction:
    """A reduction with a factor for its inputs and a factor for its results.

    Integers are multiplied in float64 and rounded toward zero, as in Horovod.
    """

    by: ReduceOp
    before: float = 1.0
    after: float = 1.0

    def of(self, size: int) -> ScaledReduction:
        """Converts an average that has a postscale factor to an equivalent sum; returns other reductions unchanged."""
        if self.by is Average and self.after != 1.0:
            return ScaledReduction(Sum, self.before, self.after / size)
        return self

    def __str__(self) -> str:
        """Formats the arguments that must match across ranks."""
        factors = (("prescale_factor", self.before), ("postscale_factor", self.after))
        return ", ".join([f"op={self.by.name}", *(f"{name}={value!r}" for name, value in factors if value != 1.0)])


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiplies a tensor in place. Integers are multiplied in float64 and rounded toward zero."""
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
    """Returns a request for an in-place reduction. The call's result is the return value of `finish`."""
    require_tensors(tensors, "allreduce")
    listed = [tensor.detach() for tensor in tensors]  # the detached tensors share memory with `tensors`
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
    @staticmethod
    def forward(
        ctx: Any, how: ScaledReduction, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how, ctx.process_set = how, process_set
        copies = _copies(tensors)
        process_set.calls().perform(reduction_request(copies, how, name, process_set, lambda: None))
        if how.by not in (Sum, Average):
            ctx.save_for_backward(*tensors)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients. Sums and averages reduce them like the tensors; other reductions use derivatives."""
        if ctx.how.by in (Sum, Average):
            return None, None, None, *_reduced(ctx.how, None, ctx.process_set, grads)
        summed = _reduced(replace(ctx.how, by=Sum), None, ctx.process_set, grads)
        return None, None, None, *times_derivatives(ctx, summed)


def times_derivatives(ctx: Any, grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of a product, minimum or maximum with respect to the tensors saved in `ctx`."""
    how, ranks = ctx.how, ctx.process_set
    slopes = (_derivative(tensor * how.before, how.by, ranks) for tensor in ctx.saved_tensors)
    return [grad * slope for grad, slope in zip(grads, slopes, strict=True)]


def _derivative(mine: torch.Tensor, by: ReduceOp, process_set: ProcessSet) -> torch.Tensor:
    """Returns the derivative of a product, minimum or maximum over the ranks with respect to this rank's tensor."""
    if by is Product:
        factors = torch.stack([torch.ones_like(mine)] * process_set.size())
        factors[process_set.rank()] = mine
        (factors,) = _reduced(ScaledReduction(Product), None, process_set, [factors])
        return torch.cat([factors[: process_set.rank()], factors[process_set.rank() + 1 :]]).prod(0)
    (extreme,) = _reduced(ScaledReduction(by), None, process_set, [mine])
    is_mine = (mine == extreme).to(mine.dtype)
    (holders,) = _reduced(ScaledReduction(Sum), None, process_set, [is_mine])
    return is_mine / holders


def _reduced(
    how: ScaledReduction, name: str | None, process_set: ProcessSet, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return outputs_of(_Allreduce, how, name, process_set, *tensors)


def outputs_of(function: type[Function], *arguments: object) -> tuple[torch.Tensor, ...]:
    """Returns a typed version of `function.apply` that returns a tuple of tensors."""
    return cast(tuple[torch.Tensor, ...], function.apply(*arguments))


def _copies(tensors: Sequence[torch.Tensor], call: str = "allreduce") -> list[torch.Tensor]:
    require_tensors(tensors, call)
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
    """Starts an in-place reduction of `tensor` over the ranks, an average by default; returns a handle.

    Raises:
        ValueError: a call with this name is pending.
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
    """Starts an in-place reduction of several tensors in one call; returns a handle."""
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
    """Starts a reduction of `tensor` over the ranks into a new tensor; returns a handle."""
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
    """Reduces `tensor` over the ranks into a new tensor; computes the average by default. Differentiable.

    Raises:
        ValueError: `op` is Adasum, or `average` is given as well.
        PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: see `paceline.all_reduce`.
    """
    require_tensors([tensor], "allreduce")
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks in place; returns `tensor`."""
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
    """Starts a reduction of several tensors in one call, into new tensors; returns a handle."""
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
    """Reduces several tensors over the ranks in one call, into new tensors. Differentiable."""
    require_tensors(tensors, "grouped_allreduce")
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
    """Reduces several tensors over the ranks in place in one call; returns the tensors."""
    how = ScaledReduction(reduction(op, average), prescale_factor, postscale_factor)
    return process_set.calls().perform(reduction_request(tensors, how, name, process_set, lambda: list(tensors)))


def _broadcasting(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> CallRequest[torch.Tensor]:
    require_tensors([tensor], "broadcast")
    detached = tensor.detach()

    def run(group: ProcessGroup) -> torch.Tensor:
        broadcast_into(detached, root_rank, group)
        return tensor

    return CallRequest(CallKind.BROADCAST, [detached], run, f"root_rank={root_rank}", name)


class _Broadcast(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        (copy,) = _copies([tensor], "broadcast")
        return process_set.calls().perform(_broadcasting(copy, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the mean of the ranks' gradients on the root, and zeros on the other ranks."""
        (mean,) = _reduced(ScaledReduction(Average), None, ctx.process_set, [grad])
        return mean if default_group().rank() == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[torch.Tensor]:
    """Starts an in-place broadcast of the root's `tensor`; returns a handle.

    Raises:
        ValueError: a broadcast with this name is pending.
    """
    return CallHandle(process_set.calls(), _broadcasting(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CallHandle[torch.Tensor]:
    """Starts a broadcast of the root's `tensor` into a new tensor; returns a handle."""
    (copy,) = _copies([tensor], "broadcast")
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns a copy of the root's `tensor`. Differentiable: the root receives the mean of the ranks' gradients."""
    return applied(_Broadcast, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrites `tensor` with the root's `tensor`; returns `tensor`."""
    return process_set.calls().perform(_broadcasting(tensor, root_rank, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called `barrier` or `join`. Does not wait for asynchronous calls in progress."""
    process_set.calls().barrier()


def join(device: int = -1) -> int:
    """Waits until all ranks have called `join`; returns the rank that called it last, on every rank.

    `join` supports training with different numbers of batches per rank. A rank that is waiting in `join` contributes
    zeros to the all-reduces of other ranks, including those from `DistributedOptimizer`; averages still divide by the
    number of all ranks. Barriers do not wait for such a rank. All other calls, such as `allgather` and `broadcast`,
    raise a `CollectiveMismatchError` while a rank is waiting in `join`.

    Args:
        device: The index of the CUDA device on which to allocate the zeros if tensors are on GPUs. If negative, the
            current device is used.
    """
    return global_process_set.calls().join(device)


Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Overwrites the parameters on every rank with those of the root.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: The source rank.

    Raises:
        ValueError: an entry is not a tensor.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors: list[Any] = [entry[1] if isinstance(entry, tuple) else entry for entry in named]
    if (other := next((entry for entry in tensors if not isinstance(entry, torch.Tensor)), None)) is not None:
        raise ValueError(f"broadcast_parameters got a {type(other).__name__}; it takes tensors")
    if tensors:
        detached = [tensor.detach() for tensor in tensors]
        global_process_set.calls().perform(
            CallRequest(
                CallKind.BROADCAST,
                detached,
                lambda group: broadcast_coalesced(detached, root_rank, group),
                f"broadcast_parameters, root_rank={root_rank}",
            )
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Overwrites the optimizer's state and options on every rank with those of the root.

    Args:
        optimizer: The optimizer, which may be a `DistributedOptimizer`.
        root_rank: The source rank.
        model: Ignored.
    """
    mine = optimizer.state_dict()
    received = broadcast_object(mine, root_rank)
    if global_process_set.rank() != root_rank:
        optimizer.load_state_dict(received)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> Any:
    """Returns the root's object on every rank.

    Args:
        obj: The object to send; ignored on ranks other than the root.
        root_rank: The source rank.
        name: The name of the call, which must be the same on all ranks.
        process_set: The participating ranks.
        allow_pickle: Whether to permit objects of any type. Such objects are pickled. Unpickling allows the sender to
            run code on the other ranks. Numbers, strings, containers, tensors and arrays do not need pickling.
    """
    objects = [obj]

    def run(group: ProcessGroup) -> Any:
        broadcast_object_list(objects, root_rank, group, allow_pickle=allow_pickle)
        return objects[0]

    details = f"broadcast_object, root_rank={root_rank}"
    return process_set.calls().perform(CallRequest(CallKind.OBJECTS, [], run, details, name))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, allow_pickle: bool = False
) -> list[Any]:
    """Returns the objects from all ranks in rank order. See `broadcast_object` for `allow_pickle`."""
    objects: list[Any] = [None] * process_set.size()

    def run(group: ProcessGroup) -> list[Any]:
        all_gather_object(objects, obj, group, allow_pickle=allow_pickle)
        return objects

    return process_set.calls().perform(CallRequest(CallKind.OBJECTS, [], run, "allgather_object", name))
