"""`bench/gpu.py` selects steps, and formats errors."""

from __future__ import annotations

import time

import pytest
from bench_gpu import gpu as bench
from gpu_cases.catalog import steps

RAISED = """rank 1 failed:
Traceback (most recent call last):
  File "world.py", line 94, in _run
    answer.send(("ok", time.monotonic(), fn(*args)))
paceline.errors.PeerLostError: rank 0 is gone
and a second line
rank 0 died with exit code -9
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("world.RankFailed: " + RAISED, "rank 1: paceline.errors.PeerLostError: rank 0 is gone"),
        (RAISED, "rank 1: paceline.errors.PeerLostError: rank 0 is gone"),
        ("rank 0 died with exit code -6", "rank 0 died with exit code -6"),
        ("ranks [0, 1] did not finish within 40.0 s", "ranks [0, 1] did not finish within 40.0 s"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_an_error_is_named_by_its_rank_and_exception(text, line):
    assert bench.first_line(text) == line


def test_steps_have_names_of_their_own_and_time_limits():
    names = [step.name for step in steps()]
    assert len(names) == len(set(names)) > 50
    assert all(0 < step.limit_s <= 90 for step in steps())


def test_the_machine_is_looked_at_first_and_its_speed_last():
    sections = list(dict.fromkeys(step.section for step in steps()))
    assert sections[0] == "health" and sections[-1] == "speed"


def chosen(*words: str) -> list[str]:
    run = bench.Run(bench.parse(["--device", "fake", *words]), time.monotonic() + 60)
    return [step.name for step in steps() if run.is_chosen(step.name) and "fake" in step.devices]


def test_steps_are_chosen_by_parts_of_their_names():
    assert chosen("--steps", "ZeRO 2", "zero: stage 1") == ["zero: stage 1", "checkpoint: ZeRO 2"]
    assert len(chosen()) == sum("fake" in step.devices for step in steps())


def test_figures_are_spelled_in_the_table():
    outcome = bench.Outcome("ddp: float32", bench.OK, 1.234, figures={"losses": 20, "largest difference": 1.4e-7})
    assert outcome.row["figures"] == "losses 20, largest difference 1.4e-07"
    assert outcome.row["s"] == 1.23
