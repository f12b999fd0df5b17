"""The linear collectives as functions of autograd.

A linear collective maps the tensors of all ranks to the tensors of all ranks. Its backward is the adjoint of that map,
which is again one of the functions here. Broadcast and reduce are each other's adjoints, as are gather and scatter, and
all_gather and reduce_scatter; all_reduce and all_to_all are their own. So every backward can itself be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd import Function

from paceline.group import collectives, rooted
from paceline.group.eager import eager_methods
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp

Gradients = tuple[torch.Tensor | None, ...]


def applied(function: type[Function], *arguments: object) -> torch.Tensor:
    """Returns what `function.apply` returns, which torch leaves untyped."""
    return cast(torch.Tensor, function.apply(*arguments))


def all_exchanged(
    group: ProcessGroup, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Returns what `AllToAll.apply` returns, which is several tensors."""
    return cast(tuple[torch.Tensor, ...], AllToAll.apply(group, outputs, *tensors))  # type: ignore[no-untyped-call]


@eager_methods
class AllReduce(Function):
    """Reduces all ranks' tensors on every rank; differentiable for SUM and AVG."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.op = group, op
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(result, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the gradients, reduced in the same way."""
        return None, None, applied(AllReduce, ctx.group, ctx.op, grad)


@eager_methods
class Broadcast(Function):
    """Copies the root's tensor to every rank."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root = group, root
        result = tensor.clone(memory_format=torch.contiguous_format)
        rooted.broadcast(result, group=group, group_src=root)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the sum of the gradients on the root, and zeros elsewhere."""
        return None, None, applied(Reduce, ctx.group, ctx.root, ReduceOp.SUM, grad)


@eager_methods
class Reduce(Function):
    """Reduces all ranks' tensors on the root, with zeros elsewhere; differentiable for SUM and AVG."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root, ctx.op = group, root, op
        result = tensor.clone(memory_format=torch.contiguous_format)
        rooted.reduce(result, op=op, group=group, group_dst=root)
        return result if group.rank() == root else result.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the root's gradient, divided by the number of ranks for AVG."""
        return None, None, None, _averaged(applied(Broadcast, ctx.group, ctx.root, grad), ctx.op, ctx.group)


@eager_methods
class AllGather(Function):
    """Concatenates all ranks' tensors in rank order in the contiguous tensor `output`."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.shape = group, tensor.shape
        ctx.mark_dirty(output)
        collectives.all_gather_into_tensor(output, tensor, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns this rank's part of the sum of the gradients."""
        return None, None, applied(ReduceScatter, ctx.group, ReduceOp.SUM, grad.new_empty(ctx.shape), grad.contiguous())


@eager_methods
class ReduceScatter(Function):
    """Gives each rank its part of the reduction of all contiguous tensors; differentiable for SUM and AVG."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, op: ReduceOp, output: torch.Tensor, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.op, ctx.shape = group, op, tensor.shape
        ctx.mark_dirty(output)
        collectives.reduce_scatter_tensor(output, tensor, op, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns all ranks' gradients, divided by the number of ranks for AVG."""
        gathered = applied(AllGather, ctx.group, grad.new_empty(ctx.shape), grad)
        return None, None, None, _averaged(gathered, ctx.op, ctx.group)


@eager_methods
class Gather(Function):
    """Stacks all ranks' tensors on the root, along a new first dimension, with zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root = group, root
        if group.rank() == root:
            result = tensor.new_empty((group.size(), *tensor.shape))
            rooted.gather(tensor, list(result.unbind(0)), group=group, group_dst=root)
            return result
        rooted.gather(tensor, group=group, group_dst=root)
        return tensor.new_zeros((group.size(), *tensor.shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns this rank's part of the root's gradient."""
        return None, None, applied(Scatter, ctx.group, ctx.root, grad.new_empty(grad.shape[1:]), *grad.unbind(0))


@eager_methods
class Scatter(Function):
    """Copies the root's tensor for this rank to `output`.

    The tensors that the other ranks pass only determine whether those ranks take part in the backward.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.root, ctx.shapes = group, root, [tensor.shape for tensor in tensors]
        ctx.mark_dirty(output)
        rooted.scatter(output, tensors if group.rank() == root else None, group=group, group_src=root)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns all ranks' gradients on the root, and zeros elsewhere."""
        gathered = applied(Gather, ctx.group, ctx.root, grad)
        if ctx.shapes == [grad.shape] * ctx.group.size():
            return None, None, None, *gathered.unbind(0)
        return None, None, None, *(grad.new_zeros(shape) for shape in ctx.shapes)


@eager_methods
class AllToAll(Function):
    """Copies one tensor from each rank to each rank, into tensors that share the memory of `outputs`."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, outputs: Sequence[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns aliases of the outputs: those may be views, which autograd does not let a function write to."""
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in tensors]
        collectives.all_to_all(outputs, tensors, group)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        """Sends each gradient back to the rank that its tensor came from."""
        returned = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *all_exchanged(ctx.group, returned, grads)


@eager_methods
class AllToAllSingle(Function):
    """Copies rows of one tensor from each rank to each rank; None as split sizes divides them evenly."""

    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        output: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.shape, ctx.output_rows, ctx.input_rows = group, tensor.shape, output_rows, input_rows
        ctx.mark_dirty(output)
        collectives.all_to_all_single(output, tensor, output_rows, input_rows, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Sends the gradients of the rows back to the ranks that the rows came from."""
        returned = grad.new_empty(ctx.shape)
        return (
            None,
            None,
            None,
            None,
            applied(AllToAllSingle, ctx.group, returned, ctx.input_rows, ctx.output_rows, grad),
        )


def _averaged(grad: torch.Tensor, op: ReduceOp, group: ProcessGroup) -> torch.Tensor:
    return grad / group.size() if op is ReduceOp.AVG else grad
