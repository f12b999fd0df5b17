"""Sees to it that every rank holds the same model before training starts."""

from __future__ import annotations

import json

import torch
from torch import nn

from paceline.errors import CollectiveMismatchError
from paceline.group.process_group import ProcessGroup


def describe_module(module: nn.Module) -> list[list[object]]:
    """Name, shape, strides, type and requires_grad of each parameter and buffer, in order of registration."""
    described: list[list[object]] = []
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            shape = list(tensor.shape)
            described.append([kind, name, shape, list(tensor.stride()), str(tensor.dtype), tensor.requires_grad])
    return described


def require_same_module(module: nn.Module, group: ProcessGroup) -> None:
    """Compares the model's description with rank 0's, on every rank.

    Raises:
        CollectiveMismatchError: on every rank, naming the first difference.
    """
    descriptions = [json.loads(data) for data in group.all_gather_bytes(json.dumps(describe_module(module)).encode())]
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other != first:
            raise CollectiveMismatchError(
                f"the models differ: {_first_difference(first, other, group.ranks[0], group.ranks[rank])}. "
                "Build the same model on every rank (same arguments, same order of layers) before wrapping it"
            )


def _first_difference(first: list[list[object]], other: list[list[object]], rank: int, other_rank: int) -> str:
    for left, right in zip(first, other, strict=False):
        if left != right:
            return f"rank {rank} has {_say(left)}, rank {other_rank} has {_say(right)}"
    longer, longer_rank = (first, rank) if len(first) > len(other) else (other, other_rank)
    extra = longer[min(len(first), len(other))]
    return f"rank {longer_rank} has {_say(extra)}, which rank {rank + other_rank - longer_rank} does not have"


def _say(entry: list[object]) -> str:
    kind, name, shape, stride, dtype, requires_grad = entry
    return f"{kind} {name!r} of shape {shape}, strides {stride}, {dtype}, requires_grad={requires_grad}"


def byte_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors' memory as uint8, so that several types travel in one call; they must be contiguous."""
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def broadcast_tensors(tensors: list[torch.Tensor], group: ProcessGroup) -> None:
    """Copies rank 0's values to all ranks, whatever the types and layouts."""
    plain = [tensor for tensor in tensors if tensor.is_contiguous()]
    group.broadcast(byte_views(plain), 0)
    for tensor in tensors:
        if not tensor.is_contiguous():
            group.broadcast(tensor.detach(), 0)
