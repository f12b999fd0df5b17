"""Runs the examples in a shortened form."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_states import newest_whole
from forked_scripts import run_alone, run_script

from paceline import CollectiveMismatchError
from paceline.train.checkpoint.format.root import Root

ROOT = Path(__file__).parents[2]


def run_example(path: str, *arguments: str) -> str:
    os.chdir(ROOT)
    return run_script(path, *arguments)


def run_example_that_raises(path: str, *arguments: str) -> str:
    with pytest.raises(CollectiveMismatchError) as raised:
        run_example(path, *arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["examples/digits.py", "--epochs", "1"], "parameters bitwise equal       yes"),
        (["examples/char_lm.py", "--steps", "2", "--batch-size", "2"], "held-out text:"),
        (["examples/slow_network.py", "--steps", "5", "--batch-size", "2", "--every", "4"], "held-out text:"),
    ],
)
def test_an_example_runs_on_two_ranks(ranks, arguments, shown):
    said, _ = ranks(2)(run_example, *arguments)
    assert shown in said and "\nResult: 2 rank" in said


def test_the_example_of_checkpoints_by_hand_saves(ranks):
    said, _ = ranks(2)(run_example, "examples/checkpoints_by_hand.py")
    assert "paceline.save: step 5, manifest.json, rank_00000_000.safetensors" in said and "\nResult: " in said


def test_the_example_of_checkpoints_leaves_whole_ones(ranks, tmp_path):
    arguments = ["examples/checkpoints.py", "--steps", "3", "--every", "2", "--directory", str(tmp_path)]
    said, _ = ranks(2)(run_example, *arguments)
    assert "2 ranks start at step 0" in said
    assert f"has reached step 3. {tmp_path} contains step_0000000002, step_0000000003." in said
    found, skipped = newest_whole(Root(tmp_path), digests=True)
    assert found is not None and (found.step, skipped) == (3, [])


def test_the_example_of_faults_slows_one_rank_down(ranks):
    said, _ = ranks(2)(run_example, "examples/faults.py", "slow", "--steps", "2")
    assert "\nResult: the training loop reached step 2 with the fault 'slow'." in said


def test_the_example_of_faults_makes_ranks_disagree(ranks):
    said = ranks(2)(run_example_that_raises, "examples/faults.py", "disagree", "--steps", "100")
    assert all("rank 1" in text and "all_reduce(float32, 5 elements, SUM)" in text for text in said)


def test_the_digits_example_is_an_ordinary_script_too(ranks):
    (said,) = ranks(1)(run_alone, str(ROOT / "examples" / "digits.py"), "--epochs", "1")
    assert "ranks                          1" in said
