"""Linear layers and embeddings divided among ranks, and differentiable collectives between them.

Outside the divided layers, all ranks in the group compute the same activations and the same loss, and therefore the
same gradients. (In `paceline.comm.functional`, by contrast, the loss is the sum of the ranks' losses.) The backward
pass of each collective follows from this convention (Shoeybi et al. 2019, "Megatron-LM"; for sequence parallelism,
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

| forward | backward |
| --- | --- |
| `copied`: identity | sum over the ranks |
| `summed`: sum over the ranks | identity |
| `split`: this rank's part | all parts |
| `joined`: all parts | this rank's part |
| `joined_for_parts`: all parts, as input to a divided layer | this rank's part of the sum |
| `summed_into_parts`: this rank's part of the sum | all parts |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from paceline.comm.group.collectives import collectives
from paceline.comm.group.eager import eager, eager_methods
from paceline.comm.group.process_group import ProcessGroup

_SLICE = "_paceline_slice"


@dataclass(frozen=True)
class WeightSlice:
    """This rank's part of a tensor: the indices `[start, stop)` along `dim`; `shape` is that of the whole tensor."""

    group: ProcessGroup
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]


def bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Returns the start and end of a part if `length` is divided as evenly as possible; longer parts come first."""
    least, longer = divmod(length, parts)
    start = part * least + min(part, longer)
    return start, start + least + (part < longer)


def divided(parameter: torch.Tensor, dim: int, group: ProcessGroup) -> torch.nn.Parameter:
    """Creates a parameter that contains this rank's part of `parameter`; `slice_of` returns its WeightSlice."""
    start, stop = bounds(parameter.size(dim), group.size(), group.rank())
    part = parameter.detach().narrow(dim, start, stop - start).clone()
    own = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(own, _SLICE, WeightSlice(group, dim, start, stop, tuple(parameter.shape)))
    return own


def slice_of(parameter: torch.Tensor) -> WeightSlice | None:
    """Returns the WeightSlice of a divided parameter, or None if the parameter is whole."""
    found: WeightSlice | None = getattr(parameter, _SLICE, None)
    return found


WHOLE = None
"""The layout of a replicated activation. The layout of a divided one is the dimension along which it is divided."""
Layout = int | None


@eager
def copied(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns `tensor`; backward sums its gradient over the ranks, because each rank may use the tensor differently."""
    return _apply(tensor, "copied", 0, 0, group)


@eager
def summed(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns the sum of the ranks' tensors."""
    return _apply(tensor, "summed", 0, 0, group)


@eager
def split(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Returns this rank's part of a replicated tensor."""
    return _apply(tensor, "split", dim % tensor.ndim, tensor.size(dim), group)


@eager
def joined(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    """Concatenates the ranks' parts along `dim` up to size `length`; all ranks must use the result in the same way."""
    return _apply(tensor, "joined", dim % tensor.ndim, length, group)


@eager
def joined_for_parts(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    """Concatenates the ranks' parts along `dim` up to size `length`, as input to a divided layer."""
    return _apply(tensor, "joined_for_parts", dim % tensor.ndim, length, group)


@eager
def summed_into_parts(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Returns this rank's part of the sum of the ranks' tensors."""
    return _apply(tensor, "summed_into_parts", dim % tensor.ndim, tensor.size(dim), group)


@eager_methods
class _Collective(Function):
    """The collective `name`; its backward pass is the collective that `_BACKWARD` assigns to it.

    `length` is the size of the whole tensor along `dim`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
        ctx.arguments = _BACKWARD[name], dim, length, group
        return _FORWARD[name](tensor, dim, length, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _apply(grad, *ctx.arguments), None, None, None, None


_apply: Callable[..., torch.Tensor] = _Collective.apply


def _view(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(result, group=group)
    return result


def _own_part(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    start, stop = bounds(length, group.size(), group.rank())
    return tensor.narrow(dim, start, stop - start).contiguous()


def _join(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    """Gathers parts whose lengths may differ; pads them to the length of the first part, which is the longest."""
    lengths = [stop - start for start, stop in (bounds(length, group.size(), rank) for rank in range(group.size()))]
    if tensor.size(dim) != lengths[group.rank()]:
        raise ValueError(
            f"{group.me}: tensor parallelism: this rank has {tensor.size(dim)} of {length} elements in dimension "
            f"{dim}, where {lengths[group.rank()]} are expected: the ranks' parts are {lengths}"
        )
    first = tensor.movedim(dim, 0)
    own = first.new_zeros((lengths[0], *first.shape[1:]))
    own[: first.size(0)] = first
    parts = own.new_empty((group.size(), *own.shape))
    collectives.all_gather_into_tensor(parts, own, group)
    whole = torch.cat([part[:size] for part, size in zip(parts, lengths, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _sum_into_parts(tensor: torch.Tensor, dim: int, length: int, group: ProcessGroup) -> torch.Tensor:
    if dim == 0 and length % group.size() == 0:
        result = tensor.new_empty((length // group.size(), *tensor.shape[1:]))
        collectives.reduce_scatter_tensor(result, tensor.contiguous(), group=group)
        return result
    return _own_part(_sum(tensor, dim, length, group), dim, length, group)


_FORWARD = {
    "copied": _view,
    "summed": _sum,
    "split": _own_part,
    "joined": _join,
    "joined_for_parts": _join,
    "summed_into_parts": _sum_into_parts,
}
_BACKWARD = {
    "copied": "summed",
    "summed": "copied",
    "split": "joined",
    "joined": "split",
    "joined_for_parts": "summed_into_parts",
    "summed_into_parts": "joined_for_parts",
}


def sum_of_parts(tensor: torch.Tensor, layout: Layout, group: ProcessGroup) -> torch.Tensor:
    """Sums the ranks' tensors, and returns the sum in the given layout."""
    return summed(tensor, group) if layout is WHOLE else summed_into_parts(tensor, layout, group)


def redistributed(
    part: torch.Tensor, dim: int, layout: Layout, group: ProcessGroup, length: int | None = None
) -> torch.Tensor:
    """Converts a tensor that is divided along `dim` to another layout; all ranks must use the result in the same way.

    `length` is the total size along `dim`; if it is None, all ranks' parts have the same size.
    """
    if layout is not WHOLE and layout % part.ndim == dim % part.ndim:
        return part
    whole = joined(part, dim, part.size(dim) * group.size() if length is None else length, group)
    return whole if layout is WHOLE else split(whole, layout, group)


class ColwiseLinear(nn.Linear):
    """A linear layer whose output features are divided; `all_out_features` is their total number over all ranks."""

    group: ProcessGroup
    all_out_features: int
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output in the layout `output_layout`."""
        if self.input_layout is WHOLE:
            whole = copied(input, self.group)
        else:
            length = input.size(self.input_layout) * self.group.size()
            whole = joined_for_parts(input, self.input_layout, length, self.group)
        return redistributed(super().forward(whole), -1, self.output_layout, self.group, self.all_out_features)


class RowwiseLinear(nn.Linear):
    """A linear layer whose input features are divided among the ranks; the ranks' results are summed."""

    group: ProcessGroup
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' results, plus the bias, which is replicated."""
        if self.input_layout is WHOLE:
            own = split(input, -1, self.group)
        else:
            own = redistributed(input, self.input_layout, -1, self.group)
        result = sum_of_parts(functional.linear(own, self.weight), self.output_layout, self.group)
        if self.bias is None:
            return result
        if self.output_layout is not WHOLE and self.output_layout % result.ndim == result.ndim - 1:
            return result + _own_part(self.bias, 0, len(self.bias), self.group)
        return result + self.bias


class ColwiseEmbedding(nn.Embedding):
    """An embedding whose features are divided; `all_embedding_dim` is their total number over all ranks."""

    group: ProcessGroup
    all_embedding_dim: int
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the embedding vectors in the layout `output_layout`."""
        if self.input_layout is not WHOLE:
            input = redistributed(input, self.input_layout, WHOLE, self.group)
        return redistributed(super().forward(input), -1, self.output_layout, self.group, self.all_embedding_dim)


class RowwiseEmbedding(nn.Embedding):
    """An embedding whose indices are divided; `all_num_embeddings` is their total number over all ranks."""

    group: ProcessGroup
    all_num_embeddings: int
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the embedding vectors for all indices in `input`, in the layout `output_layout`.

        Raises:
            IndexError: an index is out of range.
        """
        if self.input_layout is not WHOLE:
            input = redistributed(input, self.input_layout, WHOLE, self.group)
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.all_num_embeddings:
            raise IndexError(
                f"{self.group.me}: embedding: the indices range from {int(input.min())} to {int(input.max())}; "
                f"they must be from 0 to {self.all_num_embeddings - 1}"
            )
        start, stop = bounds(self.all_num_embeddings, self.group.size(), self.group.rank())
        is_foreign = (input < start) | (input >= stop)
        own = super().forward((input - start).masked_fill(is_foreign, 0))
        return sum_of_parts(own.masked_fill(is_foreign.unsqueeze(-1), 0.0), self.output_layout, self.group)
