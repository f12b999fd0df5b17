"""The objects that DistributedDataParallel inspects: outputs, graphs, modules and gradients."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from paceline.train.autograd_graph import find_tensors, may_require_grad, used_parameters
from paceline.train.ddp.gradient_buckets import BucketGradients, have_aliases, shares_memory
from paceline.train.ddp.module_monitor import ModuleStructure

Pair = namedtuple("Pair", "left right")


@dataclass
class Answer:
    logits: torch.Tensor
    extra: object = None


@pytest.mark.parametrize(
    "nest",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, (b,)),
        lambda a, b: {"a": a, "more": {"b": b}},
        lambda a, b: OrderedDict(a=a, b=[b, 3, None]),
        lambda a, b: Pair(a, b),
        lambda a, b: Answer(a, Answer(b)),
        lambda a, b: {a, b},
    ],
)
def test_tensors_are_found_in_any_nest(nest):
    a, b = torch.ones(1), torch.zeros(1)
    assert {id(tensor) for tensor in find_tensors(nest(a, b))} == {id(a), id(b)}


def test_only_the_parameters_in_the_graph_are_used():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    used = used_parameters([torch.relu(a(torch.ones(1, 2))), c])
    assert used == {id(a.weight), id(a.bias), id(c)}
    assert id(b.weight) not in used


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


def test_what_contains_itself_is_looked_into_once():
    tensor = torch.ones(1)
    outer: list[object] = [tensor]
    outer += [outer, {"outer": outer}, (tensor,)]
    assert [id(each) for each in find_tensors(outer)] == [id(tensor)] * 2


class Long(list[object]):
    """A list that records how far it was read."""

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


def gradients_of(*params: nn.Parameter) -> BucketGradients:
    return BucketGradients(params, [f"p{at}" for at in range(len(params))])


def with_gradient(param: torch.Tensor, gradient: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(param)
    param.grad = gradient
    return param


def test_gradients_are_taken_where_they_are():
    param = with_gradient(torch.ones(2, 3), torch.ones(2, 3))
    memory = gradients_of(param).collect(copy_shared=False)
    assert memory.pieces == [param.grad.data_ptr(), 24]
    assert memory.copies == []


def test_a_channels_last_gradient_is_taken_where_it_is():
    weight = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    param = with_gradient(weight, torch.ones_like(weight))
    assert gradients_of(param).collect(copy_shared=True).pieces[0] == param.grad.data_ptr()


def test_a_gradient_of_another_layout_is_reduced_in_a_copy():
    weight = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    param = with_gradient(weight, torch.randn(2, 3, 4, 4))
    memory = gradients_of(param).collect(copy_shared=False)
    (_, copy), gradient = memory.copies[0], param.grad.clone()
    assert copy.stride() == param.stride()
    copy.mul_(2)
    memory.write_back()
    assert torch.equal(param.grad, 2 * gradient)


def test_a_conjugate_gradient_is_reduced_in_a_copy():
    value = torch.randn(3, dtype=torch.complex64)
    param = with_gradient(torch.ones(3, dtype=torch.complex64), value.conj())
    memory = gradients_of(param).collect(copy_shared=False)
    assert torch.equal(memory.tensors[0], value.conj().resolve_conj())
    assert not memory.tensors[0].is_conj()


def test_a_shared_gradient_is_reduced_in_place_unless_wary():
    param = with_gradient(torch.ones(4), torch.randn(4))
    other = param.grad.detach()
    assert shares_memory(param.grad)
    memory = gradients_of(param).collect(copy_shared=False)
    assert memory.pieces[0] == other.data_ptr()
    assert memory.copies == memory.successors == []


def test_only_one_of_two_gradients_that_share_memory_is_replaced():
    kept = torch.ones(2, 3, requires_grad=True)
    param = nn.Parameter(torch.ones(3, 2))
    (2 * (kept.view(6) + param.view(6))).sum().backward()
    assert kept.grad.data_ptr() == param.grad.data_ptr()
    memory = gradients_of(param).collect(copy_shared=True)
    memory.tensors[0].fill_(5)
    memory.write_back()
    assert (param.grad == 5).all()
    assert (kept.grad == 2).all()


def test_a_gradient_that_is_a_view_of_the_users_buffer_stays_one():
    buffer = torch.zeros(8)
    param = with_gradient(torch.ones(4), buffer[4:])
    memory = gradients_of(param).collect(copy_shared=True)
    memory.tensors[0].fill_(5)
    memory.write_back()
    assert buffer.tolist() == [0] * 4 + [5] * 4


def test_a_missing_gradient_is_named():
    gradients = gradients_of(nn.Parameter(torch.ones(1)), with_gradient(torch.ones(1), torch.ones(1)))
    assert gradients.collect(copy_shared=False) is None
    assert gradients.missing() == ["p0"]


def test_a_sparse_gradient_is_refused_by_name():
    param = with_gradient(torch.ones(2, 2), torch.ones(2, 2).to_sparse())
    with pytest.raises(TypeError, match=r"'p0'.*sparse_coo.*sparse=False"):
        gradients_of(param).collect(copy_shared=False)


def test_a_gradient_of_another_type_is_refused_by_name():
    param = nn.Parameter(torch.ones(2))
    gradients = gradients_of(param)
    param.data = param.data.double()
    param.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"'p0'.*float64.*float32.*Convert the module first"):
        gradients.collect(copy_shared=False)


def test_a_gradient_that_is_a_part_of_another_is_seen():
    storage = torch.randn(6)
    whole, part = with_gradient(torch.ones(6), storage), with_gradient(torch.ones(2), storage[4:])
    left, right = with_gradient(torch.ones(3), storage[:3]), with_gradient(torch.ones(3), storage[3:])
    assert have_aliases([gradients_of(whole).collect(copy_shared=False), gradients_of(part).collect(copy_shared=False)])
    assert have_aliases([gradients_of(left, part, right).collect(copy_shared=False)])
    assert not have_aliases([gradients_of(right, left).collect(copy_shared=False)])


def test_gradients_in_one_memory_are_seen():
    storage = torch.randn(4)
    a, b = with_gradient(torch.ones(4), storage.view(4)), with_gradient(torch.ones(2, 2), storage.view(2, 2))
    empty = [with_gradient(torch.ones(0), torch.ones(0)) for _ in range(2)]
    assert have_aliases([gradients_of(a).collect(copy_shared=False), gradients_of(b).collect(copy_shared=False)])
    assert not have_aliases([gradients_of(a, *empty).collect(copy_shared=False)])
