"""Collectives through which gradients flow, like `torch.distributed.nn.functional`, but with correct gradients.

May use: `group` and below. Start reading at `linear.py`, which has the collectives as functions of autograd; the
others (MAX, MIN, PRODUCT) are built from those and from torch's own reductions.

In the backward every rank calls the adjoint collective. The gradient of a rank's input is that of the sum of all
ranks' losses with respect to it. This has three consequences:

- Every rank must run the backward through the call, even where its result is of no use, such as on the other ranks
  after `reduce` and `gather`. A rank whose loss does not need the result can add `0 * result.sum()` to it.
- Whether the input requires a gradient must be the same on all ranks. `broadcast` and `scatter` ensure that
  themselves: the source decides.
- The ranks must make the calls in the same order, as always. Their backwards then have the same order too.

Under torch.compile each call is a graph break.

All of them raise what `paceline.all_reduce` and the others raise, in the backward as well, and ValueError on a rank
that is not in `group`. `src` and `dst` are ranks of the default group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.functional.linear import (
    AllGather,
    AllReduce,
    AllToAllSingle,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    all_exchanged,
    applied,
)
from paceline.functional.templates import announce_gradient, announce_template, following
from paceline.group.arguments import root_rank
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction

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

_LOCALLY: dict[ReduceOp, Callable[[torch.Tensor, int], torch.Tensor]] = {
    ReduceOp.PRODUCT: torch.prod,
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
}


@eager
def all_reduce(tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """Returns the reduction of all ranks' `tensor`, the same on every rank; `tensor` does not change.

    The gradient is the true one for every reduction: for SUM the sum of the ranks' gradients, for AVG their mean, and
    for PRODUCT that sum times the product of the other ranks' values. For MIN and MAX it goes to the ranks that have
    the extreme value, in equal parts. (`torch.distributed.nn.functional.all_reduce` reduces the gradients with `op`
    itself, which is wrong for the last three.) PRODUCT, MIN and MAX gather all tensors if a gradient is required.

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
    """Returns the reduction of all ranks' `tensor` on rank `dst`, and zeros on the others.

    The gradient is that of `all_reduce`, of rank `dst`'s loss alone; the gradients of the zeros are ignored.

    Raises:
        TypeError: `op` is not defined for the tensor's type.
    """
    members = _members(group, "reduce")
    root = root_rank(members, dst, None, "reduce", "dst")
    tensor, op = _unscaled(tensor, op, "reduce")
    if _is_by_one_call(tensor, op):
        return applied(Reduce, members, root, op, tensor)
    return _locally(applied(Gather, members, root, tensor), op)


@eager
def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Reduces the ranks' `input_list[r]` into rank r's `output` and returns it; gradients flow through `output` itself.

    Args:
        output: has the shape of each input.
        input_list: one tensor for each rank, all with one shape.

    Raises:
        TypeError: `op` is not defined for the tensors' type.
        ValueError: there is not one input for each rank, or the shapes differ.
    """
    members = _members(group, "reduce_scatter")
    shapes = {tuple(tensor.shape) for tensor in (output, *input_list)}
    if len(input_list) != members.size() or len(shapes) != 1:
        raise ValueError(
            f"{members}: reduce_scatter takes one tensor for each of the {members.size()} ranks, all of the output's "
            f"shape {list(output.shape)}; got {[list(tensor.shape) for tensor in input_list]}"
        )
    return reduce_scatter_tensor(output, torch.stack(list(input_list)), op, members)


@eager
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Does what `reduce_scatter` does, for inputs that are concatenated in rank order in one tensor.

    Args:
        output: this rank's part.
        input: has any shape, and `world_size` times as many elements as `output`.

    Raises:
        TypeError: `op` is not defined for the tensors' type.
        ValueError: `input` has a different number of elements.
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
    """Returns rank `src`'s `tensor` on every rank; the other ranks' tensors determine only the shape and the type.

    The gradient of rank `src`'s tensor is the sum of all ranks' gradients; that of the other tensors is zero. The
    result requires a gradient on all ranks if rank `src`'s tensor does.
    """
    members = _members(group, "broadcast")
    root = root_rank(members, src, None, "broadcast", "src")
    if torch.is_grad_enabled() and _is_differentiable(tensor):
        tensor = following(tensor, announce_gradient(tensor.requires_grad, members, root))
    return applied(Broadcast, members, root, tensor)


@eager
def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns all ranks' `tensor` by rank on rank `dst`, and as many tensors of zeros on the others.

    The gradient of each rank's tensor is that of its place on rank `dst`; the gradients of the zeros are ignored.
    """
    members = _members(group, "gather")
    return applied(Gather, members, root_rank(members, dst, None, "gather", "dst"), tensor).unbind(0)


@eager
def scatter(tensors: Sequence[torch.Tensor] | None, src: int = 0, group: Group = None) -> torch.Tensor:
    """Returns the entry for this rank of rank `src`'s `tensors`.

    Args:
        tensors: on rank `src` one for each rank, all with one shape and type. Other ranks pass None; anything else
            that they pass is ignored, and its gradient is zero.

    The gradients of all ranks are gathered on rank `src`. The result requires a gradient on all ranks if one of rank
    `src`'s tensors does.

    Raises:
        ValueError: on all ranks, if rank `src` did not pass one tensor of one shape and type for each rank.
    """
    members = _members(group, "scatter")
    root = root_rank(members, src, None, "scatter", "src")
    template, requires_grad = announce_template(tensors, members, root)
    given = [*tensors] if tensors is not None else []
    if members.rank() != root and not any(each.requires_grad for each in given):
        given = [following(template.new_empty(0), requires_grad)]
    elif not requires_grad:
        given = [each.detach() for each in given]
    return applied(Scatter, members, root, template, *given)


@eager
def all_gather(tensor: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns all ranks' `tensor` by rank, on every rank; all have one shape and type.

    The gradient of a rank's tensor is the sum of the gradients of its copies on all ranks.
    """
    return _gathered(tensor, _members(group, "all_gather")).unbind(0)


@eager
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """Writes all ranks' `input_tensor` in rank order to `output_tensor` and returns that; gradients flow through it.

    Args:
        output_tensor: contiguous; has any shape, and `world_size` times as many elements as `input_tensor`.

    Raises:
        ValueError: `output_tensor` is not contiguous, or has a different number of elements.
    """
    return applied(AllGather, _members(group, "all_gather_into_tensor"), output_tensor, input_tensor)


_all_gather_base = all_gather_into_tensor  # its name in torch.distributed.nn.functional


@eager
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor], input_tensor_list: Sequence[torch.Tensor], group: Group = None
) -> tuple[torch.Tensor, ...]:
    """Sends `input_tensor_list[r]` to rank r, and returns what this rank received, by sending rank.

    `output_tensor_list` gives the shapes and is written to, but gradients flow through the returned tensors only.
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
    """Does what `all_to_all` does, for rows of `input` and `output`; gradients flow through the returned `output`.

    The split sizes are numbers of rows, one for each rank; None or an empty list splits evenly.

    Raises:
        ValueError: the split sizes do not add up to the number of rows, or the rows cannot be split evenly.
    """
    members = _members(group, "all_to_all_single")
    return applied(AllToAllSingle, members, output, output_split_sizes or None, input_split_sizes or None, input)


def _members(group: Group, call: str) -> ProcessGroup:
    members = resolve(group)
    if members is None:
        raise ValueError(f"{call}: this rank is not in the group; call it on the group's members only")
    return members


def _unscaled(tensor: torch.Tensor, op: Reduction, call: str) -> tuple[torch.Tensor, ReduceOp]:
    """Returns the tensor, multiplied by the factor of `op` if it has one, and the reduction without the factor."""
    if isinstance(op, PremulSum):
        return tensor * op.factor, ReduceOp.SUM
    if op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_complex():
        raise TypeError(f"{call}: {op.name} is not defined for {tensor.dtype}; reduce real tensors")
    return tensor, op


def _gathered(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return applied(AllGather, group, tensor.new_empty((group.size(), *tensor.shape)), tensor)


def _locally(gathered: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Returns the reduction over the first dimension; torch computes its gradient."""
    return _LOCALLY[op](gathered, 0)


def _is_by_one_call(tensor: torch.Tensor, op: ReduceOp) -> bool:
    """Returns whether one collective suffices: the reduction is linear, or no gradient is required."""
    return op not in _LOCALLY or not (tensor.requires_grad and torch.is_grad_enabled())


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
