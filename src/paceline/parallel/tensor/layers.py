"""Linear layers and embeddings of which each rank of a group has a part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from paceline.group.process_group import ProcessGroup
from paceline.parallel.tensor.flow import copied, joined, joined_for_parts, split, summed, summed_into_parts
from paceline.parallel.tensor.slices import bounds

WHOLE = None
"""Stands for an activation that every rank has whole; a number is the dimension along which it is divided."""
Layout = int | None


def for_parts(tensor: torch.Tensor, layout: Layout, length: int | None, group: ProcessGroup) -> torch.Tensor:
    """Returns the whole of an activation, which the ranks are about to use differently.

    Args:
        layout: how `tensor` is divided.
        length: how long the whole is in that dimension; None for as many times as long as there are ranks.
    """
    if layout is WHOLE:
        return copied(tensor, group)
    whole = tensor.size(layout) * group.size() if length is None else length
    return joined_for_parts(tensor, layout, whole, group)


def sum_of_parts(tensor: torch.Tensor, layout: Layout, group: ProcessGroup) -> torch.Tensor:
    """Returns the sum of what the ranks computed, divided as `layout` says."""
    return summed(tensor, group) if layout is WHOLE else summed_into_parts(tensor, layout, group)


class ColwiseLinear(nn.Linear):
    """A linear layer of which each rank computes some of the output features.

    Attributes:
        all_out_features: how many output features all ranks have together.
    """

    group: ProcessGroup
    all_out_features: int
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns this rank's features, or all of them if the output's layout is whole."""
        own = super().forward(for_parts(input, self.input_layout, None, self.group))
        if self.output_layout is WHOLE:
            return joined(own, -1, self.all_out_features, self.group)
        return own


class RowwiseLinear(nn.Linear):
    """A linear layer of which each rank uses some of the input features; the ranks' results are added up."""

    group: ProcessGroup
    input_layout: Layout
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, plus the bias, which every rank has whole."""
        own = split(input, -1, self.group) if self.input_layout is WHOLE else input
        result = sum_of_parts(functional.linear(own, self.weight), self.output_layout, self.group)
        return result if self.bias is None else result + self.bias


class ColwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has some of the features.

    Attributes:
        all_embedding_dim: how many features all ranks have together.
    """

    group: ProcessGroup
    all_embedding_dim: int
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns this rank's features, or all of them if the output's layout is whole."""
        own = super().forward(input)
        return joined(own, -1, self.all_embedding_dim, self.group) if self.output_layout is WHOLE else own


class RowwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has the vectors of some indices.

    Attributes:
        all_num_embeddings: how many indices all ranks have together.
    """

    group: ProcessGroup
    all_num_embeddings: int
    output_layout: Layout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of all indices: each comes from the rank that has it.

        Raises:
            IndexError: an index is negative, or too large.
        """
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.all_num_embeddings:
            raise IndexError(
                f"{self.group.me}: embedding: the indices range from {int(input.min())} to {int(input.max())}; "
                f"they must be from 0 to {self.all_num_embeddings - 1}"
            )
        start, stop = bounds(self.all_num_embeddings, self.group.size(), self.group.rank())
        is_elsewhere = (input < start) | (input >= stop)
        own = super().forward((input - start).masked_fill(is_elsewhere, 0))
        return sum_of_parts(own.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.output_layout, self.group)
