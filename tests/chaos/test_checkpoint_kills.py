"""Ranks are killed at every operation by which they save a checkpoint: a reported one is always there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import launching

TESTS = Path(__file__).parents[1]


def test_no_kill_at_any_operation_loses_a_checkpoint(tmp_path):
    environment = {**launching.ENVIRONMENT, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, TESTS / "checkpoint_kills.py", tmp_path],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rank 0"]["operations"] > 30 and found["rank 1"]["operations"] > 5
    assert found["all"]["operations"] >= found["rank 0"]["operations"]
    assert all(each["reported"] >= 1 for each in found.values())
