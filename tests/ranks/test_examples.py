"""The examples run, in short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.format.root import Root

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["examples/digits.py", "--epochs", "1"], "all ranks hold the same bits   yes"),
        (["examples/char_lm.py", "--steps", "2", "--batch-size", "2"], "text it has not seen:"),
        (["examples/slow_network.py", "--steps", "5", "--batch-size", "2", "--every", "4"], "text it has not seen:"),
        (["examples/checkpoints_by_hand.py"], "paceline.save: step 5, manifest.json, rank_00000_000.safetensors"),
    ],
)
def test_an_example_runs_on_two_ranks(arguments, shown):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_the_example_of_checkpoints_leaves_whole_ones(tmp_path):
    arguments = ["examples/checkpoints.py", "--steps", "3", "--every", "2", "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks begin at step 0" in done.stdout
    found, skipped = Root(tmp_path).newest_whole(digests=True)
    assert found is not None and (found.step, skipped) == (3, [])


def test_the_digits_example_is_an_ordinary_script_too():
    done = subprocess.run(
        [sys.executable, "examples/digits.py", "--epochs", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more would wait for each other on cores that others use
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks                          1" in done.stdout
