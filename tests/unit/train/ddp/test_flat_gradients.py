"""The gradients of a bucket as views of one flat tensor, here on the CPU, where nothing differs."""

from __future__ import annotations

import torch
from torch import nn

from paceline.train.ddp.flat_gradients import FlatGradients

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
    again = flat.whole(parts[0])
    assert (again.data_ptr(), again.shape) == (whole.data_ptr(), whole.shape)
    other = [parts[0].t().contiguous().t(), *parts[1:]]
    assert not flat.has(other)


def test_parts_are_no_views_and_may_be_detached():
    params = parameters()
    _, parts = flat_of(params).copy_of(with_gradients(params))
    for part in parts:
        assert not part._is_view()
        part.detach_()


def test_gradients_that_the_program_has_saved_keep_their_values():
    params = parameters()
    flat = flat_of(params)
    _, saved = flat.copy_of(with_gradients(params))
    before = [part.clone() for part in saved]
    whole, parts = flat.copy_of(with_gradients(params))
    whole.zero_()
    assert all(map(torch.equal, saved, before))
    assert flat.has(parts) and not flat.has(saved)


def test_memory_is_free_when_gradients_are_discarded():
    params = parameters()
    flat = flat_of(params)
    whole, parts = flat.copy_of(with_gradients(params))
    assert flat._storage is not None and not flat._storage.expired()
    del whole, parts
    assert flat._storage.expired()
