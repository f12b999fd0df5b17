"""The objects that DistributedDataParallel inspects: outputs, graphs, modules and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from paceline.train.autograd_graph import find_tensors, may_require_grad
from paceline.train.ddp.module_monitor import ModuleStructure


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(2))),
        lambda m: setattr(m, "1", nn.ReLU()),
        lambda m: m.append(nn.Linear(2, 2)),
        lambda m: setattr(m[1], "inner", nn.Linear(2, 2)),  # a layer that had neither parameters nor submodules
        lambda m: delattr(m[0], "bias"),
    ],
)
def test_a_change_of_the_module_is_seen(change):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    structure = ModuleStructure(module)
    assert structure.is_unchanged()
    change(module)
    assert not structure.is_unchanged()


def test_training_does_not_change_the_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    structure = ModuleStructure(module)
    module(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    module.load_state_dict(module.state_dict())
    module.double().eval()
    assert structure.is_unchanged()


def test_buffers_are_listed_once_and_anew_when_replaced():
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    module[1].running_mean = module[0].running_mean
    structure = ModuleStructure(module)
    assert len(structure.buffers()) == 5
    module[0].running_var = torch.zeros(2)
    assert any(buffer is module[0].running_var for buffer in structure.buffers())


class Long(list[object]):
    """A list that records how far it has been read."""

    read = 0

    def __iter__(self) -> Iterator[object]:
        for entry in super().__iter__():
            self.read += 1
            yield entry


def test_long_inputs_are_looked_at_in_part():
    inputs, tensor = Long([object()] * 10**5), torch.ones(1)
    assert may_require_grad((tensor, inputs)), "not all was looked at"
    assert inputs.read < 2000
    assert not may_require_grad((tensor, inputs[:100], {"text": ["words"] * 500}))
    assert may_require_grad((tensor, ["words"] * 500, [tensor.clone().requires_grad_()]))
    assert list(find_tensors((Long([object()] * 10**4), ["words"] * 10**4, tensor))) == [tensor]
