"""Checkpoints that are written while training continues: the files contain the state of one step."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import wait_until
from sampling import examples
from torch import nn
from world import RankFailed, Ranks

import paceline as dist
from paceline.train.checkpoint import save
from paceline.train.elastic import failpoints


def model_of(step: int, width: int = 257) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 9))
    fill(model, step)
    return model


@torch.no_grad()
def fill(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.fill_(step)


def require_one_step(root: Path, step: int) -> None:
    model = model_of(-1)
    assert dist.load({"model": model}, root) == step
    for param in model.parameters():
        assert torch.equal(param.detach(), torch.full_like(param, step)), "steps are mixed"


def mutate_while_saving(root: Path, times: int) -> None:
    dist.init_process_group()
    model = model_of(0)
    for step in range(1, times + 1):
        fill(model, step)
        handle = dist.save({"model": model}, root, step=step, asynchronous=True)
        assert handle is not None
        while not handle.wait(0.001):
            fill(model, -step)
        if step % 5 == 0:
            require_one_step(root, step)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory, because the tests check the contents of files and not their durability."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as directory:
        yield Path(directory)


@pytest.mark.parametrize(("size", "times"), [(1, 40), (3, 10)])
def test_saved_bits_are_those_of_one_step(ranks: type[Ranks], in_memory: Path, size: int, times: int) -> None:
    ranks(size)(mutate_while_saving, in_memory, examples(times))


def save_where_a_file_is(root: Path) -> None:
    dist.init_process_group()
    model = model_of(1)
    dist.save({"model": model}, root, step=1)
    original, told = save.write_part, []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise dist.CheckpointError("rank 1 could not write x: No space left on device")
        return original(*args, **kwargs)

    save.write_part = refuse
    handle = dist.save({"model": model}, root, step=2, asynchronous=True)
    assert handle is not None
    with pytest.raises(dist.CheckpointError, match="rank 1 could not write x: No space left"):
        handle.wait()
    dist.save({"model": model}, root, step=3, asynchronous=True)
    with pytest.raises(dist.CheckpointError, match="rank 1 could not write x"):
        dist.save({"model": model}, root, step=4)
    save.write_part = original
    dist.barrier()
    require_one_step(root, 1)
    dist.barrier()
    assert [each.name for each in root.iterdir() if each.name.startswith(".")] == [], told
    dist.barrier()
    dist.save({"model": model}, root, step=5)


def test_an_error_of_the_writer_reaches_every_rank(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(2)(save_where_a_file_is, tmp_path)


def die_at(point: str, count: int, victim: int, root: Path, asynchronous: bool) -> int:
    """Returns the last step that was reported as saved; the victim dies in the third save unless it exits earlier."""
    dist.init_process_group()
    rank, reported = dist.get_rank(), 0
    model = model_of(0)
    for step in (1, 2, 3):
        fill(model, step)
        if step == 3 and rank == victim:
            failpoints.arm("it", f"it:{point}@{count}=kill")
        try:
            handle = dist.save({"model": model}, root, step=step, asynchronous=asynchronous)
            fill(model, -1)
            if handle is not None:
                handle.wait()
        except (dist.CheckpointError, dist.CollectiveError):
            return reported
        reported = step
    return reported


# tests/chaos/test_checkpoint_kills.py kills each rank in each of its file operations. These cases test how the
# other rank detects the death.
DEATHS = [("create", 1, False), ("sync", 1, True), ("write", 0, True), ("rename", 0, False), ("remove", 0, True)]


@pytest.mark.parametrize(("point", "victim", "asynchronous"), DEATHS)
def test_a_rank_that_dies_in_a_save_tears_nothing(
    ranks: type[Ranks], tmp_path: Path, point: str, victim: int, asynchronous: bool
) -> None:
    world = ranks(2).start(die_at, f"checkpoint.{point}", 1, victim, tmp_path, asynchronous)
    reported = world.join(expect_dead=[victim])[1 - victim]
    assert reported in (2, 3)
    model = model_of(-1)
    loaded = dist.load({"model": model}, tmp_path)
    assert loaded is not None
    assert loaded >= reported
    require_one_step(tmp_path, loaded)


def die_with_all(root: Path) -> None:
    dist.init_process_group()
    model = model_of(0)
    for step in range(1, 10_000):
        fill(model, step)
        dist.save({"model": model}, root, step=step, keep=2, asynchronous=True)
        fill(model, -1)


def test_ranks_that_die_together_leave_a_whole_one(ranks: type[Ranks], tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        world = ranks(3).start(die_with_all, tmp_path)
        wait_until(lambda: (tmp_path / "latest").exists() and len([*tmp_path.glob("step_*")]) > 1)
        for pid in world.pids:
            os.kill(pid, signal.SIGKILL)
        world.join()
    step = dist.load({"model": model_of(0)}, tmp_path)
    assert step is not None
    require_one_step(tmp_path, step)
    dist.save({"model": model_of(step + 1)}, tmp_path, step=step + 1, keep=2)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == [], "left-overs"
    require_one_step(tmp_path, step + 1)
