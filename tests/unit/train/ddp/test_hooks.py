"""The communication hooks and their states, without other ranks."""

from __future__ import annotations

import inspect

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from paceline.parallel.hooks import PowerSGDState


def test_the_state_of_power_sgd_takes_the_arguments_of_torch():
    ours, torchs = (list(inspect.signature(kind).parameters) for kind in (PowerSGDState, powerSGD_hook.PowerSGDState))
    assert ours[: len(torchs)] == torchs
