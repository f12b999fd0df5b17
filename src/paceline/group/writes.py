"""Tells autograd which tensors a call writes to, since the engine writes to their memory without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch

from paceline import _core
from paceline.group.reduce_op import ReduceOp

Count = Callable[[Iterable[object]], None]  # of tensors

_increment = torch._C._increment_version


def _one_by_one(tensors: Iterable[object]) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            _increment(tensor)


def _chosen() -> Count:
    """Returns PyTorch's own function, or one that calls it for each tensor where it takes a single one."""
    try:
        _increment([torch.empty(0, device="cpu")])
    except TypeError:
        return _one_by_one
    return cast("Count", _increment)


# Counts a write to each of the tensors, with which tensors that share their memory by PyTorch's views, and by
# `detach()`, share the count. A backward that needs a tensor as it was before then raises, instead of computing wrong
# gradients. A write that is counted twice does no harm.
count_writes: Count = _chosen()


def counting_writes(tensors: Sequence[torch.Tensor], finish: Callable[[], None] | None) -> Callable[[], None] | None:
    """Returns a last step of a call that counts its writes to the tensors, after `finish`."""
    if not tensors:
        return finish

    def counted() -> None:
        if finish is not None:
            finish()
        count_writes(tensors)

    return counted


_core.read_tensors(torch.Tensor, torch.nn.Parameter, ReduceOp, count_writes)
