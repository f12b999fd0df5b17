"""Gradients that no optimizer has used yet."""

from __future__ import annotations

import pytest
import torch

from paceline.train.gradient_use import GRADIENT_USE, is_pending


@pytest.fixture
def param() -> torch.nn.Parameter:
    GRADIENT_USE.follow()
    param = torch.nn.Parameter(torch.ones(2))
    param.sum().backward()
    return param


def test_a_gradient_is_pending_until_an_optimizer_steps(param):
    assert is_pending(param)
    torch.optim.SGD([param], 0.1).step()
    assert GRADIENT_USE.has_seen_step and not is_pending(param)


def test_an_accumulation_after_a_step_is_pending_again(param):
    torch.optim.SGD([param], 0.1).step()
    param.sum().backward()
    assert is_pending(param)


def test_the_step_of_another_optimizer_uses_nothing(param):
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1).step()
    assert is_pending(param)


def test_without_a_gradient_nothing_is_pending(param):
    param.grad = None
    assert not is_pending(param)
