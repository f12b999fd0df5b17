"""Parameters that the ranks on a host share."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import paceline as dist
from paceline.train.shared_model.shared_parameters import TornGuard


def test_a_guard_raises_while_there_is_a_reason():
    model = nn.Linear(2, 2)
    guard = TornGuard()
    guard.watch(model)
    model(torch.ones(2))
    guard.reason = "half of it"
    for use in (lambda: model(torch.ones(2)), model.state_dict, nn.Sequential(model).state_dict):
        with pytest.raises(RuntimeError, match="half of it"):
            use()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(2))
        twin.state_dict()


def test_elastic_jobs_refuse_shared_parameters(no_secret):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = dist.SharedModelOptimizer(model, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="half updated for those that survive"):
            dist.ElasticState(dist.LogicalShards(model, 2), optimizer=optimizer)
        with pytest.raises(ValueError, match="the model of a SharedModelOptimizer, with which all workers"):
            dist.ElasticState(dist.LogicalShards(model, 2))
    finally:
        dist.destroy_process_group()
