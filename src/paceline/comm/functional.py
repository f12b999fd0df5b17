"""Differentiable collectives, like `torch.distributed.nn.functional`, but with correct gradients.

In the backward pass every rank calls the adjoint collective. The gradient of a rank's input is the derivative of the
sum of all ranks' losses with respect to this input. This has three consequences:

- Every rank must run the backward pass through the call, even if it does not use the result, as is usual for ranks
  other than the destination of `reduce` and `gather`. A rank that does not use the result can add `0 * result.sum()` to
  its loss.
- The input must require a gradient either on all ranks or on none. `broadcast` and `scatter` ensure this themselves,
  because the source announces whether its input requires a gradient.
- The ranks must make the calls in the same order, as for all collectives. Their backward passes then run in the same
  order too.

With SUM and AVG a collective is a linear map from the tensors of all ranks to the tensors of all ranks; its backward
pass is the adjoint of this map. Broadcast and reduce are each other's adjoints, as are gather and scatter, and
all_gather and reduce_scatter; all_reduce and all_to_all are their own adjoints. Every backward pass can therefore be
differentiated again. For MAX, MIN and PRODUCT, the tensors are gathered and then reduced by torch.

Under torch.compile, each call causes a graph break.

All calls raise the same errors as the plain collectives, including in the backward pass. On a rank that is not in
`group`, they raise a ValueError. `src` and `dst` are ranks in the default group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import Function

from paceline.comm.engine.channel import DTYPE_CODES, DTYPES, PremulSum, ReduceOp, Reduction
from paceline.comm.group.call_plan import split_sizes
from paceline.comm.group.collectives import collectives
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager, eager_methods
from paceline.comm.group.process_group import ProcessGroup

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]


Gradients = tuple[torch.Tensor | None, ...]

_LOCALLY: dict[ReduceOp, Callable[[torch.Tensor, int], torch.Tensor]] = {
    ReduceOp.PRODUCT: torch.prod,
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
}
_MOST_DIMENSIONS = 13
_UNFIT = -1


@eager
def all_reduce(tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """Returns the reduction of `tensor` over all ranks, the same on every rank; does not modify `tensor`.

    The gradient is correct for every reduction: for SUM it is the sum of the ranks' gradients, for AVG their mean, and
    for PRODUCT their sum times the product of the other ranks' values. For MIN and MAX the sum is divided equally among
    the ranks that have the extreme value. (`torch.distributed.nn.functional.all_reduce` reduces the gradients with `op`
    itself, which is wrong for PRODUCT, MIN and MAX.) PRODUCT, MIN and MAX gather all tensors if a gradient is required.

    Raises:
        TypeError: `op` is not defined for the tensor's type.
    """
    members = _members(group, "all_reduce")
    tensor, op = _unscaled(tensor, op, "all_reduce")
    if _is_by_one_call(tensor, op):
        return applied(AllReduce, members, op, tensor)
    return _locally(_gathered(tensor, members), op)


@eager
def reduce(tensor: torch.Tensor, dst: int, op: Reduction = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """Returns the reduction of `tensor` over all ranks on rank `dst`, and zeros on all other ranks.

    The gradient is computed as for `all_reduce`, but only from rank `dst`'s loss; gradients of the zeros are ignored.

    Raises:
        TypeError: `op` is not defined for the tensor's type.
    """
    members = _members(group, "reduce")
    root = members.rank_map.root_rank(dst, None, "reduce", "dst")
    tensor, op = _unscaled(tensor, op, "reduce")
    if _is_by_one_call(tensor, op):
        return applied(Reduce, members, root, op, tensor)
    return _locally(applied(Gather, members, root, tensor), op)


@eager
def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Reduces `input_list[r]` over all ranks into rank r's `output`; returns `output`, through which gradients flow.

    Args:
        output: a tensor with the shape of this rank's input, `input_list[rank]`.
        input_list: a list of one tensor for each rank. The tensors may differ in shape, but `input_list[r]` must have
            the same shape on every rank.

    Raises:
        TypeError: `op` is not defined for the tensors' type.
        ValueError: the number of inputs differs from the number of ranks, or this rank's input does not have the
            output's shape.
    """
    members = _members(group, "reduce_scatter")
    shapes = [tuple(tensor.shape) for tensor in input_list]
    if len(shapes) != members.size() or shapes[members.rank()] != tuple(output.shape):
        raise ValueError(
            f"{members}: reduce_scatter takes one tensor for each of the {members.size()} ranks, and the tensor with "
            f"index {members.rank()} must have the output's shape {list(output.shape)}; got {list(map(list, shapes))}"
        )
    if len(set(shapes)) == 1:
        return reduce_scatter_tensor(output, torch.stack(list(input_list)), op, members)
    scaled = [_unscaled(tensor, op, "reduce_scatter") for tensor in input_list]
    inputs, plain_op = [tensor for tensor, _ in scaled], scaled[0][1]
    if all(_is_by_one_call(tensor, plain_op) for tensor in inputs):
        return applied(ReduceScatterList, members, plain_op, output, *inputs)
    received = all_exchanged(members, [torch.empty_like(output) for _ in inputs], inputs)
    return output.copy_(_locally(torch.stack(received), plain_op))


@eager
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Performs a `reduce_scatter` with the inputs concatenated in rank order in one tensor.

    Args:
        output: a tensor for this rank's part.
        input: a tensor of any shape with `world_size` times as many elements as `output`.

    Raises:
        TypeError: `op` is not defined for the tensors' type.
        ValueError: `input` has the wrong number of elements.
    """
    members = _members(group, "reduce_scatter")
    input, op = _unscaled(input, op, "reduce_scatter")
    whole = input.contiguous()
    if _is_by_one_call(whole, op):
        return applied(ReduceScatter, members, op, output, whole)
    flat = whole.view(-1)
    received = applied(AllToAllSingle, members, torch.empty_like(flat), None, None, flat)
    return output.copy_(_locally(received.view(members.size(), *output.shape), op))


@eager
def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """Returns rank `src`'s `tensor` on every rank; tensors on other ranks determine only the shape and the dtype.

    The gradient of rank `src`'s tensor is the sum of all ranks' gradients; the gradients of all other tensors are zero.
    The result requires a gradient on all ranks if rank `src`'s tensor does.
    """
    members = _members(group, "broadcast")
    root = members.rank_map.root_rank(src, None, "broadcast", "src")
    if torch.is_grad_enabled() and _is_differentiable(tensor):
        tensor = following(tensor, announce_gradient(tensor.requires_grad, members, root))
    return applied(Broadcast, members, root, tensor)


@eager
def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns every rank's `tensor`, in rank order, on rank `dst`, and the same number of zero tensors elsewhere.

    The gradient of a rank's tensor is the gradient of its copy on rank `dst`; the gradients of the zeros are ignored.
    """
    members = _members(group, "gather")
    return applied(Gather, members, members.rank_map.root_rank(dst, None, "gather", "dst"), tensor).unbind(0)


@eager
def scatter(tensors: Sequence[torch.Tensor] | None, src: int = 0, group: Group = None) -> torch.Tensor:
    """Returns this rank's entry in the `tensors` of rank `src`.

    Args:
        tensors: on rank `src`, a list of one tensor for each rank, all with the same shape and dtype. Other ranks
            usually pass None. If they pass tensors, these are ignored, and the gradients of these tensors are zero.

    The backward pass gathers all ranks' gradients on rank `src`. The result requires a gradient on all ranks if one of
    rank `src`'s tensors does.

    Raises:
        ValueError: rank `src` did not pass one tensor for each rank, all with the same shape and dtype; raised on all
            ranks.
    """
    members = _members(group, "scatter")
    root = members.rank_map.root_rank(src, None, "scatter", "src")
    template, requires_grad = announce_template(tensors, members, root)
    given = [*tensors] if tensors is not None else []
    if members.rank() != root and not any(tensor.requires_grad for tensor in given):
        given = [following(template.new_empty(0), requires_grad)]
    elif not requires_grad:
        given = [tensor.detach() for tensor in given]
    return applied(Scatter, members, root, template, *given)


@eager
def all_gather(tensor: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns every rank's `tensor`, in rank order, on all ranks. All tensors must have the same shape and dtype.

    The gradient of a rank's tensor is the sum of the gradients of its copies on all ranks.
    """
    return _gathered(tensor, _members(group, "all_gather")).unbind(0)


@eager
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """Writes every rank's `input_tensor`, in rank order, to `output_tensor` and returns it; gradients flow through it.

    Args:
        output_tensor: a contiguous tensor of any shape with `world_size` times as many elements as `input_tensor`.

    Raises:
        ValueError: `output_tensor` is not contiguous, or has the wrong number of elements.
    """
    return applied(AllGather, _members(group, "all_gather_into_tensor"), output_tensor, input_tensor)


_all_gather_base = all_gather_into_tensor  # the name in torch.distributed.nn.functional


@eager
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor], input_tensor_list: Sequence[torch.Tensor], group: Group = None
) -> tuple[torch.Tensor, ...]:
    """Sends `input_tensor_list[r]` to rank r; returns the received tensors in the order of the sending ranks.

    `output_tensor_list` determines the shapes and receives the data, but gradients flow only through the returned
    tensors.
    """
    return all_exchanged(_members(group, "all_to_all"), list(output_tensor_list), input_tensor_list)


@eager
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Performs an `all_to_all` on the rows of one tensor; gradients flow through the returned `output`.

    The split sizes are numbers of rows, one per rank; with None or an empty list, rows are divided evenly.

    Raises:
        ValueError: the split sizes do not add up to the number of rows, or the rows cannot be split evenly.
    """
    members = _members(group, "all_to_all_single")
    received = split_sizes(output_split_sizes, "all_to_all_single", "output_split_sizes")
    sent = split_sizes(input_split_sizes, "all_to_all_single", "input_split_sizes")
    return applied(AllToAllSingle, members, output, received, sent, input)


@eager_methods
class AllReduce(Function):
    """All-reduce; differentiable for SUM and AVG."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.op = group, op
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(result, op, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the all-reduced gradients."""
        return None, None, applied(AllReduce, ctx.group, ctx.op, grad)


@eager_methods
class Broadcast(Function):
    """Copies the root's tensor to every rank."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root = group, root
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.broadcast(result, group=group, group_src=root)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the sum of the gradients on the root, and zeros elsewhere."""
        return None, None, applied(Reduce, ctx.group, ctx.root, ReduceOp.SUM, grad)


@eager_methods
class Reduce(Function):
    """Reduces to the root and returns zeros on other ranks; differentiable for SUM and AVG."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root, ctx.op = group, root, op
        result = tensor.clone(memory_format=torch.contiguous_format)
        collectives.reduce(result, op=op, group=group, group_dst=root)
        return result if group.rank() == root else result.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the root's gradient, divided by the number of ranks for AVG."""
        return None, None, None, _averaged(applied(Broadcast, ctx.group, ctx.root, grad), ctx.op, ctx.group)


@eager_methods
class AllGather(Function):
    """Concatenates all ranks' tensors in rank order into the contiguous tensor `output`."""

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
    """Reduce-scatter of contiguous tensors; differentiable for SUM and AVG."""

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
        """Returns the gathered gradients of all ranks, divided by the number of ranks for AVG."""
        gathered = applied(AllGather, ctx.group, grad.new_empty(ctx.shape), grad)
        return None, None, None, _averaged(gathered, ctx.op, ctx.group)


@eager_methods
class ReduceScatterList(Function):
    """Reduce-scatter of tensors that differ in shape; differentiable for SUM and AVG."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, op: ReduceOp, output: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.op, ctx.shapes = group, op, [tensor.shape for tensor in tensors]
        ctx.mark_dirty(output)
        collectives.reduce_scatter(output, list(tensors), op, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns the gradient of each rank's output, divided by the number of ranks for AVG."""
        received = [grad.new_empty(shape) for shape in ctx.shapes]
        shared = all_exchanged(ctx.group, received, [grad] * len(received))
        return None, None, None, *(_averaged(tensor, ctx.op, ctx.group) for tensor in shared)


@eager_methods
class Gather(Function):
    """Stacks all ranks' tensors on the root along a new first dimension; returns zeros on other ranks."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor."""
        ctx.group, ctx.root = group, root
        if group.rank() == root:
            result = tensor.new_empty((group.size(), *tensor.shape))
            collectives.gather(tensor, list(result.unbind(0)), group=group, group_dst=root)
            return result
        collectives.gather(tensor, group=group, group_dst=root)
        return tensor.new_zeros((group.size(), *tensor.shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        """Returns this rank's part of the root's gradient."""
        return None, None, applied(Scatter, ctx.group, ctx.root, grad.new_empty(grad.shape[1:]), *grad.unbind(0))


@eager_methods
class Scatter(Function):
    """Copies the root's tensor for this rank to `output`.

    The other ranks' tensors determine only whether those ranks run the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Writes to `output` and returns it."""
        ctx.group, ctx.root, ctx.shapes = group, root, [tensor.shape for tensor in tensors]
        ctx.mark_dirty(output)
        collectives.scatter(output, tensors if group.rank() == root else None, group=group, group_src=root)
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
    """Sends a tensor from each rank to every rank; the received tensors share memory with `outputs`."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, outputs: Sequence[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns aliases of the outputs, since autograd does not allow a function to write to views."""
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in tensors]
        collectives.all_to_all(outputs, tensors, group)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        """Sends each gradient back to the rank that sent the tensor."""
        returned = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *all_exchanged(ctx.group, returned, grads)


@eager_methods
class AllToAllSingle(Function):
    """Copies rows from each rank to every rank; if the split sizes are None, the rows are divided evenly."""

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
        """Sends the gradient of each row back to the rank that sent the row."""
        returned = grad.new_empty(ctx.shape)
        own = applied(AllToAllSingle, ctx.group, returned, ctx.input_rows, ctx.output_rows, grad)
        return None, None, None, None, own


def applied(function: type[Function], *arguments: object) -> torch.Tensor:
    """Calls `function.apply` and casts the result to its type, which PyTorch's type stubs do not specify."""
    return cast(torch.Tensor, function.apply(*arguments))


def all_exchanged(
    group: ProcessGroup, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Calls `AllToAll.apply`, which returns several tensors."""
    return cast(tuple[torch.Tensor, ...], AllToAll.apply(group, outputs, *tensors))  # type: ignore[no-untyped-call]


def _averaged(grad: torch.Tensor, op: ReduceOp, group: ProcessGroup) -> torch.Tensor:
    return grad / group.size() if op is ReduceOp.AVG else grad


def following(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Returns `tensor`, or an alias of it, with the given `requires_grad`."""
    return tensor if tensor.requires_grad == requires_grad else tensor.detach().requires_grad_(requires_grad)


def announce_gradient(requires_grad: bool, group: ProcessGroup, root: int) -> bool:
    """Returns, on every rank, whether the root's tensor requires a gradient."""
    flag = torch.tensor([requires_grad], device="cpu")
    collectives.broadcast(flag, group=group, group_src=root)
    return bool(flag.item())


def announce_template(
    tensors: Sequence[torch.Tensor] | None, group: ProcessGroup, root: int
) -> tuple[torch.Tensor, bool]:
    """Returns uninitialized tensors like the root's tensors, and whether any of the root's tensors requires a gradient.

    Raises:
        ValueError: the root did not pass one tensor for each rank, all with the same shape and dtype; raised on all
            ranks.
    """
    head = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
    if group.rank() == root:
        fields = _describe(tensors or (), group.size())
        head[: len(fields)] = torch.tensor(fields, device="cpu")
    collectives.broadcast(head, group=group, group_src=root)
    dtype, requires_grad, dimensions, *shape = head.tolist()
    if dtype == _UNFIT:
        raise ValueError(
            f"{group}: scatter needs one tensor for each of the {group.size()} ranks on rank {group.ranks[root]}, all "
            f"of one shape, with at most {_MOST_DIMENSIONS} dimensions, and of one type that collectives support"
        )
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.empty(shape[:dimensions], dtype=DTYPES[dtype], device=device), bool(requires_grad)


def _describe(tensors: Sequence[torch.Tensor], size: int) -> list[int]:
    kinds = {(tensor.dtype, tuple(tensor.shape)) for tensor in tensors}
    if len(tensors) != size or len(kinds) != 1:
        return [_UNFIT]
    ((dtype, shape),) = kinds
    if dtype not in DTYPE_CODES or len(shape) > _MOST_DIMENSIONS:
        return [_UNFIT]
    requires_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return [DTYPE_CODES[dtype], requires_grad, len(shape), *shape]


def _members(group: Group, call: str) -> ProcessGroup:
    members = resolve(group)
    if members is None:
        raise ValueError(f"{call}: this rank is not in the group; call it on the group's members only")
    return members


def _unscaled(tensor: torch.Tensor, op: Reduction, call: str) -> tuple[torch.Tensor, ReduceOp]:
    """Returns the tensor multiplied by the factor in `op`, if there is one, and the reduction without that factor."""
    if isinstance(op, PremulSum):
        return tensor * op.factor, ReduceOp.SUM
    if op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_complex():
        raise TypeError(f"{call}: {op.name} is not defined for {tensor.dtype}; reduce real tensors")
    return tensor, op


def _gathered(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return applied(AllGather, group, tensor.new_empty((group.size(), *tensor.shape)), tensor)


def _locally(gathered: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduces over the first dimension with torch's operations, which torch can differentiate."""
    return _LOCALLY[op](gathered, 0)


def _is_by_one_call(tensor: torch.Tensor, op: ReduceOp) -> bool:
    """Returns True if one collective suffices, because the reduction is linear or no gradient is required."""
    return op not in _LOCALLY or not (tensor.requires_grad and torch.is_grad_enabled())


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
