"""The programs in the docs run as they are printed, on two ranks that have what a reader has: a model and data."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import streams
import torch
from one_world import OneWorld, name_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

# What these pages show is run by other tests, since it needs other processes, another engine or another framework.
_RUN_ELSEWHERE = {
    "checkpoints.md": "tests/ranks/test_checkpoints_in_training.py",
    "clusters.md": "tests/clusters/test_ray.py",
    "elastic.md": "tests/elastic/test_usual_loop.py",
    "engines.md": "tests/engines/test_conformance.py",
    "hosts.md": "tests/hosts/test_formation.py",
    "large-models.md": "tests/ranks/test_tensor_parallel.py",
    "launcher.md": "tests/ranks/test_run.py",
    "nccl.md": "tests/gpu/test_nccl_on_gpus.py",
    "rendezvous.md": "tests/unit/test_rendezvous_handlers.py",
    "torch-distributed.md": "tests/ranks/test_plugin_frameworks.py",
}


def blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text())


def surroundings() -> dict[str, object]:
    """The names that the programs take for granted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    return {
        "torch": torch,
        "paceline": paceline,
        "DataLoader": DataLoader,
        "Model": partial(nn.Linear, 4, 3),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_function": nn.functional.cross_entropy,
        "dataset": dataset,
        "train_set": dataset,
        "test_set": dataset,
        "loader": DataLoader(dataset, 8),
        "epochs": 1,
        "resuming": False,
        "time_to_save": True,
        "checkpoint": {},
        "train": lambda x, y: None,
        "encoder": model,
        "stream": streams.Plain(64),
        "tokenize": default_collate,
        "split_dataset_by_node": lambda stream, rank, world_size: streams.Plain(8 + rank),
        "rank": paceline.get_rank(),
        "world_size": paceline.get_world_size(),
        "x": torch.randn(2, 4),
        "images": torch.randn(2, 4),
        "augment": lambda images: images,
        "loss": torch.ones(()),
        "scheduler": SimpleNamespace(get_last_lr=lambda: [0.1]),
        "contrastive": lambda features: features.square().sum(),
    }


def run_a_block(page: str, number: int) -> None:
    text, names = blocks(ROOT / page)[number], surroundings()
    if "model.join()" in text:  # it goes on with the model that the program before it has wrapped
        names["model"] = paceline.DistributedDataParallel(names["model"])
    if text.startswith("with optimizer.full_parameters"):  # and with the optimizer that the program before it has made
        names["optimizer"] = paceline.SharedModelOptimizer(names["model"], torch.optim.SGD, lr=0.1)
    exec(compile(text, f"{page}, program {number}", "exec"), names)


RUN_HERE = [
    partial(run_a_block, str(page.relative_to(ROOT)), number)
    for page in _PAGES
    if page.name not in _RUN_ELSEWHERE
    for number in range(len(blocks(page)))
]
ON_RANKS = OneWorld(*RUN_HERE)


@pytest.mark.parametrize("program", list(map(name_of, RUN_HERE)))
def test_a_program_of_the_docs_runs_on_two_ranks(ranks, program):
    ON_RANKS.require(2, program)


def test_there_are_programs_in_the_docs():
    assert len(RUN_HERE) > 5


@pytest.mark.parametrize("page", _RUN_ELSEWHERE)
def test_programs_that_run_elsewhere_are_python(page):
    assert (ROOT / _RUN_ELSEWHERE[page]).exists()
    for text in blocks(ROOT / "docs" / page):
        if not text.startswith(">>>"):
            compile(text, page, "exec")
