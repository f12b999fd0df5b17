"""Digests of a module's tensors."""

from __future__ import annotations

import torch

from paceline.train.checks.device_values import DeviceDigests
from paceline.train.checks.replica_check import (
    RankDigests,
    StateDigests,
    tensors_part,
)
from paceline.train.module_tensors import digest_of


def test_digests_tell_tensors_apart():
    grid = torch.arange(6.0).reshape(2, 3)
    assert digest_of([grid]) == digest_of([grid.t().contiguous().t()])
    assert digest_of([grid]) != digest_of([grid + 1])
    part, other = (tensors_part({name: grid}, DeviceDigests()) for name in "ab")
    assert part.digests() != other.digests()
    assert StateDigests({}).digests() == RankDigests(0, 0)
