"""A rank is killed during an update: no other rank continues with partly updated parameters."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shared_training import ROUND_BYTES, backward, build
from torch import nn
from world import Ranks

import paceline as dist
from paceline.train.shared_model import shared_model_optimizer as one_copy
from paceline.train.shared_model.gradient_exchange import GradientExchange

STEPS, FATAL_STEP = 5, 3
OPTIONS = {"lr": 0.05, "fused": True}


def train_with_checkpoints(path: Path, dies: str) -> str:
    """Trains from the checkpoint, if any; returns the error that ended a step, or ""."""
    dist.init_process_group()
    torch.set_num_threads(1)
    one_copy.LEAST_ROUND_BYTES = ROUND_BYTES
    model = build()
    first, state = 0, None
    if path.exists():
        first, parameters, state = torch.load(path)
        model.load_state_dict(parameters)
    optimizer = dist.SharedModelOptimizer(model, torch.optim.AdamW, **OPTIONS)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        backward(model, "mlp", step)
        if dist.get_rank() == 1 and step == FATAL_STEP and dies:
            prepare_death(dies)
        try:
            optimizer.step()
            save(model, optimizer, step + 1, path)
        except dist.PeerLostError as error:
            if "only partly updated" in str(error):
                require_torn(model, optimizer)
            return f"lost {error.rank}: {error}"
    if dies and dist.get_rank() == 1:
        threading.Event().wait()
    return ""


def prepare_death(dies: str) -> None:
    if dies == "between rounds":
        rounds = []

        def kill_in_the_second(self: GradientExchange, ready: object, update: object) -> None:
            rounds.append(ready)
            if len(rounds) == 2:  # so that some slices have been updated
                os.kill(os.getpid(), signal.SIGKILL)
            average(self, ready, update)

        average, GradientExchange.average = GradientExchange.average, kill_in_the_second  # type: ignore[method-assign]
    else:
        timer = threading.Timer(random.uniform(0, 0.002), os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()


def save(model: nn.Module, optimizer: dist.SharedModelOptimizer, step: int, path: Path) -> None:
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save((step, model.state_dict(), optimizer.state_dict()), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    dist.barrier()


def require_torn(model: nn.Module, optimizer: dist.SharedModelOptimizer) -> None:
    for use in (model.state_dict, lambda: backward(model, "mlp", 0), optimizer.step):
        with pytest.raises(RuntimeError, match=r"rank 1 \(.*only partly updated.*load a checkpoint"):
            use()


def require_resumed(ranks: Callable[[int], Ranks], undisturbed: Path, path: Path) -> None:
    """Asserts that the restarted job's results are bitwise equal to those of an undisturbed job."""
    assert ranks(3)(train_with_checkpoints, path, "") == ["", "", ""]
    if not undisturbed.exists():
        ranks(3)(train_with_checkpoints, undisturbed, "")
    whole, resumed = torch.load(undisturbed), torch.load(path)
    assert whole[0] == resumed[0] == STEPS
    for name, parameter in whole[1].items():
        assert torch.equal(parameter, resumed[1][name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return tmp_path_factory.mktemp("shared") / "undisturbed"


def test_half_an_update_is_told_and_a_restart_resumes(ranks, undisturbed, tmp_path):
    path = tmp_path / "checkpoint"
    with ranks(3).start(train_with_checkpoints, path, "between rounds") as world:
        told = world.join(expect_dead=[1])
    assert torch.load(path)[0] == FATAL_STEP
    for rank in (0, 2):
        assert told[rank].startswith("lost 1: ")
        assert "rank 1 (" in told[rank]
        assert "only partly updated" in told[rank]
    require_resumed(ranks, undisturbed, path)


def test_a_kill_at_any_instant_leaves_a_sound_checkpoint(ranks, undisturbed, tmp_path):
    path = tmp_path / "checkpoint"
    with ranks(3).start(train_with_checkpoints, path, "at any instant") as world:
        told = world.join(expect_dead=[1])
    for rank in (0, 2):
        assert told[rank] == "" or told[rank].startswith("lost 1: ")
    require_resumed(ranks, undisturbed, path)
