"""Kills ranks at every operation while they save or copy a checkpoint: every reported checkpoint must exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import launching

TESTS = Path(__file__).parents[1]


def test_no_kill_at_any_operation_loses_a_checkpoint():
    environment = {**launching.ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "support")])}
    # The directory is in memory if possible, because syncs are slow on a busy disk, and written data survives the death
    # of a process anyway.
    in_memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="paceline-kills-", dir=in_memory if in_memory.is_dir() else None) as directory:
        done = subprocess.run(
            [sys.executable, TESTS / "support" / "checkpoint_kills.py", directory],
            capture_output=True, text=True, timeout=110, env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rank 0"]["operations"] > 30 and found["rank 1"]["operations"] > 5
    assert found["all"]["operations"] >= found["rank 0"]["operations"]
    assert all(each["reported"] >= 1 for each in found.values())


def test_no_kill_at_any_step_of_a_copy_loses_the_copies(tmp_path: Path) -> None:
    environment = {**launching.ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "support")])}
    done = subprocess.run(
        [sys.executable, TESTS / "support" / "checkpoint_copies.py", tmp_path],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert len(kills) == 15
    # Each rank writes into the vaults of two hosts.
    assert all(count >= (1 if kind.endswith("done") else 2) for kind, count in kills.items()), kills
