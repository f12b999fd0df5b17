"""Conversion to SyncBatchNorm, and the behavior of SyncBatchNorm without other ranks."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import paceline as dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.3)
        self.same = self.norm
        self.inner = nn.ModuleList([nn.BatchNorm2d(2, affine=False), nn.LayerNorm(3), nn.BatchNorm3d(2)])


def test_a_replaced_batch_norm_keeps_parameters_and_buffers():
    module = Net().eval()
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    converted = dist.convert_sync_batchnorm(module)
    after = dict(converted.named_parameters()) | dict(converted.named_buffers())
    assert converted is module
    assert [type(each).__name__ for each in module.inner] == ["SyncBatchNorm", "LayerNorm", "SyncBatchNorm"]
    assert module.norm is module.same
    assert module.norm.momentum == 0.3 and not module.norm.training
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert dist.SyncBatchNorm.convert_sync_batchnorm(module) is module  # converting again changes nothing


def test_without_a_process_group_it_is_an_ordinary_batch_norm():
    plain = nn.BatchNorm2d(2)
    layer = dist.convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(4, 2, 3, 3)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)


def test_it_is_copied_and_pickled():
    layer = dist.SyncBatchNorm(2)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.process_group is None
        assert again(torch.randn(4, 2)).shape == (4, 2)
