"""Sparse gradients: rows of some of the parameter, other rows on every rank."""

from __future__ import annotations

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup


def empty_gradient(param: nn.Parameter) -> torch.Tensor:
    """A sparse gradient without rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True, check_invariants=False)


def average_sparse(params: list[nn.Parameter], group: ProcessGroup, scale: float) -> None:
    """Averages sparse gradients over the ranks, and multiplies them by `scale`.

    Every rank gets the rows of all and adds them up in the order of ranks, which leaves the same bits on all. It costs
    one call for the numbers of rows, and one for each parameter.
    """
    gradients = [_coalesced(param) for param in params]
    counts = torch.tensor([gradient._nnz() for gradient in gradients], device="cpu")
    everyones = [torch.empty_like(counts) for _ in range(group.size())]
    group.all_gather(everyones, counts)
    by_param = torch.stack(everyones, 1).tolist()
    for param, gradient, rows in zip(params, gradients, by_param, strict=True):
        param.grad = _gathered(gradient, rows, group).mul_(scale / group.size())


def _coalesced(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    gradient = param.grad.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _gathered(gradient: torch.Tensor, rows: list[int], group: ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' gradients, of which rank r's has rows[r] rows."""
    most = max(rows)
    # As bytes, so that indices and values travel in one call.
    padded = [_padded(gradient.indices().T, most), _padded(gradient.values(), most)]
    theirs = [[torch.empty_like(each) for each in padded] for _ in rows]
    group.all_gather([[_bytes(each) for each in pair] for pair in theirs], [_bytes(each) for each in padded])
    indices = torch.cat([pair[0][:count] for pair, count in zip(theirs, rows, strict=True)]).T
    values = torch.cat([pair[1][:count] for pair, count in zip(theirs, rows, strict=True)])
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
