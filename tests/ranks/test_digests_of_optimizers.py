"""Digests of states with each of torch's optimizers, before and after a checkpoint, and on a joining worker."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from world import Ranks

import paceline as dist

SPARSE_ONLY = {"SparseAdam"}
OPTIMIZERS = sorted(
    name
    for name, each in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer and name not in SPARSE_ONLY
)
MORE = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "lr": torch.tensor(0.01), "foreach": False},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "LBFGS": {"max_iter": 2},
    "Rprop": {"maximize": True},
}


class Loop:
    """Runs a few steps with one optimizer; its parameters have one- and two-digit indices."""

    def __init__(self, name: str, dtype: torch.dtype, has_more: bool) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(12)]).to(dtype)
        self.shards = dist.LogicalShards(self.model, 4)
        options = {"lr": 0.01} | (copy.deepcopy(MORE.get(name, {})) if has_more else {})
        self.optimizer: Any = getattr(torch.optim, name)(self.model.parameters(), **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.loader = dist.ShardLoader(torch.utils.data.TensorDataset(data), 4, self.shards)
        others = {"optimizer": self.optimizer, "schedule": self.schedule, "loader": self.loader}
        self.state = dist.ElasticState(self.shards, **others)

    def train(self, steps: int) -> None:
        batches = iter(self.loader)
        for _ in range(steps):
            batch = next(batches)

            def closure(batch: Any = batch) -> torch.Tensor:
                self.optimizer.zero_grad()
                return self.shards.backward(lambda x: self.model[:11](x[0]).square().mean(), batch)

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            self.schedule.step()


CASES = [
    (name, dtype, has_more)
    for name in OPTIMIZERS
    for dtype in (torch.float32, torch.bfloat16)
    for has_more in (False, True)
    if not has_more or name in MORE
]


def save_each(root: Path) -> dict[str, list[str]]:
    """Returns the digests before any step, after some steps, and on a worker that received the state."""
    from paceline.comm.group.collectives.object_codec import decode, encode

    dist.init_process_group()
    digests = {}
    for case in CASES:
        loop, joining = Loop(*case), Loop(*case)
        found = [loop.state.digest()]
        loop.train(3)
        dist.save({"all": loop.state}, root / str(case), step=3)
        found.append(loop.state.digest())
        sent = encode(loop.state._registry.capture(), "the state")
        joining.state._registry.restore(decode(bytes(sent.body), sent.buffers))
        found.append(joining.state.digest())
        digests[str(case)] = found
    return digests


def load_each(root: Path) -> dict[str, list[str]]:
    """Returns the digests of new objects, before and after loading a checkpoint into them."""
    dist.init_process_group()
    digests = {}
    for case in CASES:
        loop = Loop(*case)
        found = [loop.state.digest()]
        dist.load({"all": loop.state}, root / str(case))
        digests[str(case)] = [*found, loop.state.digest()]
        loop.train(1)  # everything that was loaded must be usable
    return digests


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_a_checkpoint_and_a_join_leave_the_digest_as_it_was(
    ranks: type[Ranks], tmp_path: Path, sizes: tuple[int, int]
) -> None:
    first, *others = ranks(sizes[0])(save_each, tmp_path)
    assert all(each == first for each in others)
    for loaded in ranks(sizes[1])(load_each, tmp_path):
        for case, (before, after, joined) in first.items():
            assert before != after, case
            assert joined == after, case
            assert loaded[case] == [before, after], case


def test_all_of_torchs_optimizers_are_tried() -> None:
    assert {"Adadelta", "Adafactor", "AdamW", "ASGD", "LBFGS", "NAdam", "RAdam", "Rprop", "SGD"} <= {*OPTIMIZERS}
