"""Runs the programs in the docs as printed, on ranks that define the programs' model and data.

The programs in docs/learn are complete, and run under the launcher. tests/unit/docs/test_docs_code.py checks that the
Chinese pages have the same programs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import doc_blocks
import launching
import pytest
import streams
import torch
from doc_blocks import LESSONS, ROOT
from one_world import OneWorld, name_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline

pytestmark = pytest.mark.soak

_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_WHOLE = [
    (str(page.relative_to(ROOT)), number)
    for folder in LESSONS
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    for number in range(len(doc_blocks.blocks(page, "python")))
]
_ON_FOUR_RANKS = ("docs/learn/collectives.md", "docs/learn/process-groups.md")
_LIMIT_S = 110

# The programs on these pages need other processes, a different engine or another framework, so other tests run them.
_RUN_ELSEWHERE = {
    "checkpoints.md": "tests/ranks/test_checkpoints_in_training.py",
    "clusters.md": "tests/clusters/test_ray.py",
    "elastic.md": "tests/elastic/test_elastic_state.py",
    "engines.md": "tests/engines/test_conformance.py",
    "hosts.md": "tests/hosts/test_formation.py",
    "large-models.md": "tests/ranks/test_parallelize.py",
    "launcher.md": "tests/ranks/test_run.py",
    "nccl.md": "tests/gpu/test_nccl_on_gpus.py",
    "rendezvous.md": "tests/unit/comm/rendezvous/test_rendezvous_handlers.py",
    "torch-distributed.md": "tests/ranks/test_plugin_frameworks.py",
}


def blocks(page: Path) -> list[str]:
    return [block.text for block in doc_blocks.blocks(page, "python")]


def surroundings() -> dict[str, object]:
    """Returns the names that the programs assume to exist."""
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
    if "model.join()" in text:  # the program uses the model that the previous program wrapped
        names["model"] = paceline.DistributedDataParallel(names["model"])
    if text.startswith("with optimizer.full_parameters"):  # and the optimizer that the previous program created
        names["optimizer"] = paceline.SharedModelOptimizer(names["model"], torch.optim.SGD, lr=0.1)
    text = text.replace('"/local/scratch"', repr(tempfile.gettempdir()))  # the reader's directory, absent here
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


@pytest.mark.parametrize(("page", "number"), _WHOLE)
def test_a_whole_program_of_the_docs_runs(page, number, tmp_path):
    text = blocks(ROOT / page)[number]
    script = tmp_path / "train.py"
    script.write_text(text)
    if "sys.argv[1]" in text:
        by_hand(script)
    elif "dist.spawn(" in text:
        subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=_LIMIT_S)
    else:
        ranks = "4" if page in _ON_FOUR_RANKS else "2"
        done = launching.run("--nproc-per-node", ranks, str(script), timeout_s=_LIMIT_S, cwd=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr


def by_hand(script: Path) -> None:
    """Starts two ranks with their numbers in environment variables."""
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank)], cwd=script.parent, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            said = rank.communicate(timeout=_LIMIT_S)[1]
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_there_are_whole_programs():
    assert len(_WHOLE) > 30
