"""A module's tensors: those that wrappers track, and digests of their values."""

from __future__ import annotations

import torch
from torch import nn

from paceline.train.checks.device_values import DeviceDigests
from paceline.train.checks.replica_check import (
    RankDigests,
    digests_of_part,
    tensors_part,
)
from paceline.train.module_tensors import collect_tracked, digest_of, ignore_tensors


def test_digests_tell_tensors_apart():
    grid = torch.arange(6.0).reshape(2, 3)
    assert digest_of([grid]) == digest_of([grid.t().contiguous().t()])
    assert digest_of([grid]) != digest_of([grid + 1])
    part, other = (tensors_part({name: grid}, DeviceDigests()) for name in "ab")
    assert digests_of_part(part) != digests_of_part(other)
    assert digests_of_part({}) == RankDigests(0, 0)


def test_a_shared_parameter_is_ignored_by_all_of_its_names():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    for names, trained in (
        (["0.weight"], {"0.weight", "0.bias"}),
        (["1.weight"], {"0.weight", "0.bias"}),
        (["0.weight", "1.weight"], {"0.bias"}),
    ):
        ignore_tensors(module, names)
        tracked = collect_tracked(module)
        assert set(tracked.trained) == trained
        assert set(collect_tracked(module, tracked.ignored).trained) == trained
        assert set(collect_tracked(module, ["0.weight"]).trained) == {"0.bias"}


def test_names_of_absent_parameters_and_buffers_can_be_ignored():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False))
    ignore_tensors(module, ["0.bias", "1.running_mean"])
    assert set(collect_tracked(module).trained) == {"0.weight", "1.weight", "1.bias"}
