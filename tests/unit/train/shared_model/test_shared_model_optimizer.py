"""The core's optimizers match torch's up to rounding, and have the same state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES
from paceline.train.shared_model.shared_model_optimizer import FusedUpdates
from paceline.train.shared_model.shared_shards import ReadyRound

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
OPTIONS = [
    (AdamW, {}),
    (AdamW, {"weight_decay": 0.3, "maximize": True, "betas": (0.6, 0.7), "eps": 1e-3}),
    (AdamW, {"weight_decay": 0.0, "betas": (0.2, 0.99)}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.3, "maximize": True}),
    (SGD, {}),
    (SGD, {"weight_decay": 0.3, "maximize": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
]


def ready_round(params: list[torch.Tensor], gradients: list[torch.Tensor], padding: int = 0) -> ReadyRound:
    sums = torch.cat([*(gradient.flatten() for gradient in gradients), torch.ones(padding, dtype=params[0].dtype)])
    averages, at = [], 0
    for param in params:
        averages.append((param, sums[at : at + param.numel()]))
        at += param.numel()
    return ReadyRound(DTYPE_CODES[sums.dtype], [], sums, averages)


def apply_in_tiles(update: _core.Update, sums: torch.Tensor, tile: int) -> None:
    for at in range(0, sums.numel(), tile):
        piece = sums[at : at + tile]
        update.apply(piece.data_ptr(), piece.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_the_core_updates_as_torch_does(case, dtype):
    optimizer_class, options = OPTIONS[case]
    generator = torch.Generator().manual_seed(case)
    sizes = [1, 1000, 17, 64]
    start = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    mine, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    groups = [[{"params": each[:2]}, {"params": each[2:], "lr": 0.3}] for each in (mine, theirs)]
    ours = optimizer_class(groups[0], lr=0.01, fused=True, **options)
    torchs = optimizer_class(groups[1], lr=0.01, fused=True, **options)
    updates = FusedUpdates(ours)
    for step in range(5):
        gradients = [torch.randn(size, generator=generator, dtype=dtype) * 10.0 ** (step - 3) for size in sizes]
        for param, other, gradient in zip(mine, theirs, gradients, strict=True):
            param.grad, other.grad = gradient.clone(), gradient
        updates.begin_step()
        ready = ready_round(mine, gradients, padding=5)
        update = updates.begin(ready)
        needs_state = "momentum" in options or optimizer_class is not SGD
        assert (update is None) == (step == 0 and needs_state)
        if update is None:
            ours.step()  # torch creates the state in this step
        else:
            apply_in_tiles(update, ready.sums, 33)
        torchs.step()
        rounding = {"rtol": 2e-6, "atol": 2e-7} if dtype is torch.float32 else {"rtol": 1e-14, "atol": 1e-15}
        torch.testing.assert_close(mine, theirs, **rounding)
        for param, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(dict(ours.state[param]), dict(torchs.state[other]), **rounding)


def begin_after_a_step(optimizer: torch.optim.Optimizer) -> _core.Update | None:
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    updates = FusedUpdates(optimizer)
    updates.begin_step()
    return updates.begin(ready_round(params, [torch.ones_like(param) for param in params]))


class Derived(SGD):
    """A subclass that may do anything."""


def test_what_the_core_cannot_do_is_left_to_torch():
    def param(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(3, dtype=dtype))]

    assert begin_after_a_step(AdamW(param(), fused=True)) is not None
    assert begin_after_a_step(AdamW(param())) is None
    assert begin_after_a_step(AdamW(param(), foreach=True)) is None
    assert begin_after_a_step(AdamW(param(), fused=True, amsgrad=True)) is None
    assert begin_after_a_step(AdamW(param(torch.bfloat16), fused=True)) is None
    assert begin_after_a_step(Derived(param(), fused=True)) is None
    assert begin_after_a_step(torch.optim.Adagrad(param(), fused=True)) is None


def test_a_loaded_state_is_the_one_that_is_updated():
    (param,) = params = [nn.Parameter(torch.zeros(3))]
    optimizer = AdamW(params, lr=0.1, fused=True)
    updates = FusedUpdates(optimizer)
    ready = ready_round(params, [torch.ones(3)])
    param.grad = torch.ones(3)
    optimizer.step()
    updates.begin_step()
    assert updates.begin(ready) is not None
    before = optimizer.state[param]
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = optimizer.state[param]
    loaded["exp_avg"] = loaded["exp_avg"].clone()
    updates.begin_step()
    update = updates.begin(ready)
    assert update is not None
    update.apply(ready.sums.data_ptr(), ready.sums.nbytes)
    assert loaded["exp_avg"][0] > before["exp_avg"][0]


def test_the_core_updates_floats_and_doubles_only():
    with pytest.raises(ValueError, match="only float32 and float64"):
        _core.Update(DTYPE_CODES[torch.bfloat16], [])
