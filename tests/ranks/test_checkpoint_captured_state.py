"""Checkpoints saved while gradients accumulate over several backward passes: nothing is lost without a message."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from world import Ranks

import paceline as dist

BACKWARDS, MICRO_STEPS = 3, 9


class Seen:
    """Counts the batches of the whole training run."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Loop:
    """A training loop with logical shards and a step after every third backward pass."""

    def __init__(self, clears_in_place: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(2, 2))
        self.shards = dist.LogicalShards(self.model, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        data = torch.randn(8 * MICRO_STEPS, 4, generator=torch.Generator().manual_seed(1))
        self.loader = dist.ShardLoader(torch.utils.data.TensorDataset(data), 2, self.shards)
        self.seen, self.clears_in_place = Seen(), clears_in_place
        self.state = dist.ElasticState(self.shards, optimizer=self.optimizer, loader=self.loader, seen=self.seen)

    def train(self, save_after: int, root: Path, stops: bool) -> None:
        for _ in self.state.epochs(1):
            for batches in self.loader:
                if self.seen.batches % BACKWARDS == 0:
                    self.optimizer.zero_grad(set_to_none=not self.clears_in_place)
                self.shards.backward(lambda x: self.model[:3](x[0]).square().mean(), batches)
                self.seen.batches += 1
                if self.seen.batches % BACKWARDS == 0:
                    self.optimizer.step()
                if self.seen.batches == save_after:
                    dist.save({"all": self.state}, root, step=save_after)
                    if stops:
                        return


def train_to_the_end(save_after: int, root: Path, clears_in_place: bool = False) -> str:
    dist.init_process_group()
    loop = Loop(clears_in_place)
    loop.train(save_after, root, stops=False)
    return loop.state.digest()


def go_on_from_it(root: Path, clears_in_place: bool = False) -> str:
    dist.init_process_group()
    loop = Loop(clears_in_place)
    nn.init.zeros_(loop.model[0].weight)
    loop.model[0].weight.grad = torch.ones(3, 4)
    dist.load({"all": loop.state}, root)
    loop.train(0, root, stops=False)
    return loop.state.digest()


@pytest.mark.parametrize("clears_in_place", [False, True])
@pytest.mark.parametrize(("save_after", "sizes"), [(4, (2, 3)), (5, (1, 2)), (6, (2, 1))])
def test_a_training_goes_on_in_an_accumulation(
    ranks: type[Ranks], tmp_path: Path, save_after: int, sizes: tuple[int, int], clears_in_place: bool
) -> None:
    expected = {*ranks(sizes[0])(train_to_the_end, save_after, tmp_path, clears_in_place)}
    assert {*ranks(sizes[1])(go_on_from_it, tmp_path, clears_in_place)} == expected and len(expected) == 1


def sizes_of_gradients(root: Path) -> list[int]:
    """Returns the sizes of the gradients in checkpoints after a step, during accumulation, and after clearing them."""
    from paceline.train.checkpoint.format.root import open_checkpoint

    dist.init_process_group()
    found: list[int] = []
    for save_after, in_place in [(6, False), (7, False), (7, True)]:
        loop = Loop(in_place)
        if in_place:
            loop.train(6, root, stops=True)
            loop.optimizer.zero_grad(set_to_none=False)
            dist.save({"all": loop.state}, root, step=save_after)
        else:
            loop.train(save_after, root, stops=True)
        with open_checkpoint(root) as checkpoint:
            entries = checkpoint.manifest.tensors.items()
            found.append(sum(len(checkpoint.read(name)) for name, _ in entries if "/pending gradients/" in name))
    return found


def test_gradients_are_saved_only_while_they_wait_for_a_step(ranks: type[Ranks], tmp_path: Path) -> None:
    parameters = 4 * 3 + 3 + 3 + 3 + 3 + 1  # only those of the layers that are used
    assert ranks(1)(sizes_of_gradients, tmp_path) == [[0, 4 * parameters, 0]]


def load_of_before(root: Path) -> None:
    """Loads a checkpoint that an earlier version saved, without gradients."""
    from paceline.train.elastic.worker.elastic_state import ElasticState

    dist.init_process_group()
    loop, other = Loop(), Loop()
    parts = ElasticState.parts

    def without(state: dist.ElasticState) -> dict[str, Any]:
        return {name: each for name, each in parts(state).items() if name != "pending gradients"}

    ElasticState.parts = without  # type: ignore[method-assign]
    loop.train(4, root, stops=True)
    ElasticState.parts = parts  # type: ignore[method-assign]
    dist.load({"all": other.state}, root)
    assert other.state.digest() == loop.state.digest()


def test_checkpoints_without_word_of_gradients_are_loaded(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(1)(load_of_before, tmp_path)


def test_a_state_cannot_be_named_like_the_epoch(ranks: type[Ranks]) -> None:
    ranks(1)(name_a_state_epoch)


def name_a_state_epoch() -> None:
    dist.init_process_group()
    with pytest.raises(ValueError, match="ElasticState got epoch=, which is its own name"):
        dist.ElasticState(dist.LogicalShards(nn.Linear(1, 1), 1), epoch=Seen())


# - The CheckpointManager


def warned(work: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def save_while_accumulating(root: Path, kind: str) -> list[list[str]]:
    """Returns the warnings of six saves: four by one manager while gradients accumulate, and two by another manager."""
    dist.init_process_group()
    model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind != "SGD":
        stage: Any = int(kind[-1])
        optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
    manager = dist.CheckpointManager(root, asynchronous=False)
    state = {"model": model, "optimizer": optimizer, "loss": nn.MSELoss()}

    def backward() -> None:
        model(torch.ones(3, 2)).sum().backward()

    said = []
    for step, act in enumerate([backward, backward, lambda: (backward(), optimizer.step()), backward]):
        act()
        said.append(warned(lambda step=step: manager.save(step, state)))
    fresh = dist.CheckpointManager(root, asynchronous=False)
    optimizer.zero_grad()
    backward()
    optimizer.step()
    said.append(warned(lambda: fresh.save(9, state)))
    optimizer.zero_grad()
    said.append(warned(lambda: fresh.save(10, state)))
    return said


@pytest.mark.parametrize("kind", ["SGD", "zero2", "zero3"])
def test_the_manager_names_once_what_it_does_not_save(ranks: type[Ranks], tmp_path: Path, kind: str) -> None:
    first, other = ranks(2)(save_while_accumulating, tmp_path, kind)
    assert [len(each) for each in first] == [1, 0, 0, 0, 0, 0]
    assert "rank 0: the checkpoint of step 0 is saved while the parameters ['model/0." in first[0][0]
    assert "Save after optimizer.step() and before the next backward" in first[0][0]
    assert not any(other)


def test_a_late_manager_does_not_take_used_gradients_for_others(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(1)(save_late, tmp_path)


def save_late(root: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    manager = dist.CheckpointManager(root)
    state = {"model": model, "optimizer": optimizer}
    assert warned(lambda: manager.save(1, state)) == []
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert warned(lambda: manager.save(2, state)) == []
    model(torch.ones(3, 2)).sum().backward()
    assert len(warned(lambda: manager.save(3, state))) == 1
    manager.close()
