"""The gradients of a bucket as views of one flat tensor, tested on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.train.ddp.gradient_buckets import BucketGradients, FlatGradients, have_aliases
from paceline.train.module_tensors import shares_memory

SHAPES = [(3, 2), (), (0,), (4,)]


def parameters() -> list[nn.Parameter]:
    wide = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    return [*(nn.Parameter(torch.zeros(shape)) for shape in SHAPES), wide]


def flat_of(params: list[nn.Parameter]) -> FlatGradients:
    return FlatGradients(params, [param.stride() for param in params])


def with_gradients(params: list[nn.Parameter]) -> list[torch.Tensor]:
    for param in params:
        param.grad = torch.randn_like(param)
    return [param.grad for param in params if param.grad is not None]


def test_parts_have_the_values_and_the_layouts_of_the_gradients():
    params = parameters()
    gradients = with_gradients(params)
    whole, parts = flat_of(params).copy_of(gradients)
    assert whole.shape == (6 + 1 + 0 + 4 + 24,)
    for gradient, part in zip(gradients, parts, strict=True):
        assert torch.equal(part, gradient) and part.stride() == gradient.stride()
    whole.zero_()
    assert not any(part.any() for part in parts)


def test_parts_that_the_program_keeps_are_found_again():
    params = parameters()
    flat = flat_of(params)
    assert not flat.has(with_gradients(params))
    whole, parts = flat.copy_of(with_gradients(params))
    for part in parts:
        part += 1  # as autograd does in the next backward pass of an accumulation
    assert flat.has(parts)
    assert flat.whole() is whole
    other = [parts[0].t().contiguous().t(), *parts[1:]]
    assert not flat.has(other)


def test_parts_are_no_views_and_may_be_detached():
    params = parameters()
    _, parts = flat_of(params).copy_of(with_gradients(params))
    for part in parts:
        assert not part._is_view()
        part.detach_()


@pytest.mark.parametrize(
    "save",
    [
        lambda parts: parts[3],
        lambda parts: parts[3].view(2, 2),
        lambda parts: [parts[0].data],
        lambda parts: parts[4][1],
    ],
)
def test_gradients_that_the_program_has_saved_keep_their_values(save):
    params = parameters()
    flat = flat_of(params)
    _, parts = flat.copy_of(with_gradients(params))
    saved = save(parts)
    before = copy.deepcopy(saved)
    addresses = [part.data_ptr() for part in parts]
    del parts
    whole, parts = flat.copy_of(with_gradients(params))
    whole.zero_()
    assert str(saved) == str(before)
    assert [part.data_ptr() for part in parts] != addresses
    assert flat.has(parts)


def test_memory_is_used_again_when_gradients_are_discarded():
    params = parameters()
    flat = flat_of(params)
    addresses = set()
    for _ in range(4):
        gradients = with_gradients(params)
        whole, parts = flat.copy_of(gradients)
        assert all(map(torch.equal, parts, gradients))
        for param, part in zip(params, parts, strict=True):
            param.grad = part
        addresses.add(whole.data_ptr())
        del gradients, parts, part
        optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(addresses) == 1


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
    converted, other = nn.Parameter(torch.ones(2)), with_gradient(torch.ones(2), torch.ones(2))
    gradients = gradients_of(converted, other)
    converted.data = converted.data.double()
    converted.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"'p0'.*float64.*float32.*Convert the module first"):
        gradients.collect(copy_shared=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_bucket_follows_the_conversion_of_its_parameters(dtype):
    module = nn.ParameterList([torch.ones(2, 3), torch.ones(5)])
    gradients = gradients_of(*module)
    module.to(dtype)
    for param in module:
        param.grad = torch.full_like(param, 2)
    memory = gradients.collect(copy_shared=False)
    assert gradients.dtype is dtype and memory.count == 11
    assert memory.pieces[1::2] == [param.nbytes for param in module]
    assert [tensor.data_ptr() for tensor in memory.tensors] == [param.grad.data_ptr() for param in module]


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
