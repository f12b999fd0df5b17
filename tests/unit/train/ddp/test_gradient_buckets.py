"""The gradients of a bucket as views of one flat tensor, tested on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.train.ddp.gradient_buckets import FlatGradients

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
        part += 1  # as autograd does in the next backward of an accumulation
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
