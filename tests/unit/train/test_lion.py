"""The Lion optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as dist


def test_lion_moves_by_the_sign_of_its_momentum():
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = dist.Lion([param], lr=0.1, betas=(0.5, 0.75), weight_decay=0.2)
    momentum, expected = torch.zeros(3, dtype=torch.float64), param.detach().clone()
    for gradient in (torch.tensor([1.0, -1.0, 0.0]).double(), torch.tensor([-3.0, 0.5, 1.0]).double()):
        param.grad = gradient
        optimizer.step()
        direction = (0.5 * momentum + 0.5 * gradient).sign()
        expected = expected - 0.1 * (direction + 0.2 * expected)
        momentum = 0.75 * momentum + 0.25 * gradient
        torch.testing.assert_close(param.detach(), expected)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.5)}, {"weight_decay": -0.1}])
def test_lion_says_which_arguments_are_wrong(wrong):
    with pytest.raises(ValueError, match="Lion got lr="):
        dist.Lion([nn.Parameter(torch.zeros(1))], **wrong)
