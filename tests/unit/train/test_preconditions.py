"""The decision to reduce gradients during the backward pass, based on cores per rank, and warnings about layers."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paceline.train.preconditions import (
    RankFacts,
    reduces_during_backward,
    require_unwrapped,
    warn_of_torchs_sync_batch_norm,
)
from paceline.train.sync_batch_norm import SyncBatchNorm


def rank(cores, *, told=None, host="here", local_ranks=0, quota=0.0, cgroup=0, threads=1) -> RankFacts:
    return RankFacts(told, host, local_ranks, list(cores), quota, cgroup, threads)


@pytest.mark.parametrize(
    ("everyones", "overlaps"),
    [
        ([rank(range(4)), rank(range(4))], True),
        ([rank(range(3)), rank(range(3))], False),
        ([rank(range(3), told=True), rank(range(3), told=True)], True),
        ([rank(range(8), told=False), rank(range(8))], False),
        ([rank(range(2)), rank(range(2, 4))], True),  # each rank has its own cores
        ([rank(range(2), local_ranks=4), rank(range(2, 4), local_ranks=4)], True),
        ([rank(range(4), local_ranks=4), rank(range(4), local_ranks=4)], False),  # two more ranks are not in the group
        ([rank(range(2)), rank(range(2), host="there")], True),
        ([rank(range(8), quota=3.0, cgroup=1), rank(range(8), quota=3.0, cgroup=1)], False),
        ([rank(range(8), quota=2.0, cgroup=1), rank(range(8), quota=2.0, cgroup=2)], True),
    ],
)
def test_every_rank_needs_a_core_for_its_progress(everyones, overlaps):
    assert reduces_during_backward(everyones) is overlaps


def group(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def test_pytorchs_sync_batch_norm_is_warned_of_once():
    module = nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.warns(
        UserWarning, match=r"'0' and 1 other layers of Sequential.*convert_sync_batchnorm\(model\)"
    ) as told:
        warn_of_torchs_sync_batch_norm(module, group(2))
    assert len(told) == 1
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_torchs_sync_batch_norm(converted, group(2))
        warn_of_torchs_sync_batch_norm(module, group(1))
        warn_of_torchs_sync_batch_norm(module, group(2, rank=1))


class Averaged(nn.Module):
    """A module with the attributes of `DistributedDataParallel`."""

    require_backward_grad_sync = False  # its owner has disabled averaging


def test_a_wrapper_that_averages_gradients_is_rejected():
    require_unwrapped(nn.Linear(1, 1), "LogicalShards")
    with pytest.raises(TypeError, match=r"LogicalShards got a DistributedDataParallel.*pass the module inside"):
        require_unwrapped(Averaged(), "LogicalShards")
