"""A receiver's computations before it joins must not affect the script, regardless of the state that the script set."""

from __future__ import annotations

import contextlib

import pytest
import torch

from paceline.train.elastic.worker.worker_membership import warm_up


@pytest.mark.parametrize(
    "setting", [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.device("meta")]
)
def test_a_first_computation_leaves_everything_as_it_was(setting):
    with setting():
        before = torch.get_rng_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        warm_up()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before[1:]


def test_a_first_computation_computes_a_gradient(monkeypatch):
    computed = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: computed.append(backward(self)))
    warm_up()
    assert len(computed) == 1
