"""The source of a broadcast or scatter first announces its tensors, so that all ranks take part in the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.codes import DTYPE_CODES, DTYPES
from paceline.group import rooted
from paceline.group.process_group import ProcessGroup

_MOST_DIMENSIONS = 13
_UNFIT = -1


def following(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Returns `tensor`, or one on the same memory, that requires a gradient exactly if `requires_grad` is true."""
    return tensor if tensor.requires_grad == requires_grad else tensor.detach().requires_grad_(requires_grad)


def announce_gradient(requires_grad: bool, group: ProcessGroup, root: int) -> bool:
    """Returns, on every rank, whether the root's tensor requires a gradient."""
    flag = torch.tensor([requires_grad], device="cpu")
    rooted.broadcast(flag, group=group, group_src=root)
    return bool(flag.item())


def announce_template(
    tensors: Sequence[torch.Tensor] | None, group: ProcessGroup, root: int
) -> tuple[torch.Tensor, bool]:
    """Returns an uninitialised tensor like each of the root's, and whether one of those requires a gradient.

    Raises:
        ValueError: on all ranks, if the root did not pass one tensor of one shape and type for each rank.
    """
    head = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
    if group.rank() == root:
        fields = _describe(tensors or (), group.size())
        head[: len(fields)] = torch.tensor(fields)
    rooted.broadcast(head, group=group, group_src=root)
    dtype, requires_grad, dimensions, *shape = head.tolist()
    if dtype == _UNFIT:
        raise ValueError(
            f"{group}: scatter needs one tensor for each of the {group.size()} ranks on rank {group.ranks[root]}, all "
            f"of one shape, with at most {_MOST_DIMENSIONS} dimensions, and of one type that collectives take"
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
