"""Averages sparse gradients, which hold some rows of a parameter, not the same ones on every rank."""

from __future__ import annotations

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.group.sparse import GatheredRows


def empty_gradient(param: nn.Parameter) -> torch.Tensor:
    """Returns a sparse gradient without rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True, check_invariants=False)


def average_sparse(params: list[nn.Parameter], group: ProcessGroup, scale: float) -> None:
    """Averages sparse gradients over the ranks, and multiplies them by `scale`.

    It makes one call for the numbers of rows, and one for each parameter.
    """
    gradients = [_coalesced(param) for param in params]
    counts = torch.tensor([gradient._nnz() for gradient in gradients], device="cpu")
    everyones = [torch.empty_like(counts) for _ in range(group.size())]
    group.all_gather(everyones, counts)
    by_param = torch.stack(everyones, 1).tolist()
    for param, gradient, rows in zip(params, gradients, by_param, strict=True):
        gathered = GatheredRows(group, gradient, rows)
        group.all_to_all(gathered.rooms, [gathered.mine] * group.size())
        param.grad = gathered.total().mul_(scale / group.size())


def _coalesced(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    gradient = param.grad.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
