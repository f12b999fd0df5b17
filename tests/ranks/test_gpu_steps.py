"""The steps of `bench/gpu.py` on CPU ranks: correct steps pass; wrong steps are reported and do not stop the run."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch
from bench_gpu import gpu as bench
from gpu_cases.catalog import Step, steps
from gpu_cases.collectives import compare
from gpu_cases.session import Session, Setting, session
from gpu_cases.training import largest_difference

import paceline as dist


def wrong(setting: Setting) -> None:
    """Compares a sum with the sum of a different tensor."""
    with session(setting, theirs=False) as here:
        tensor = torch.full((4,), float(here.rank))
        dist.all_reduce(tensor)
        compare(here, "a sum", [tensor], [torch.tensor([1.0, 1.0, 2.0, 1.0])], is_exact=True)


def endless(setting: Setting) -> None:
    with session(setting, theirs=False) as here:
        if here.rank == 0:
            dist.barrier()
        time.sleep(60)


def dying(setting: Setting) -> None:
    os._exit(3)


@pytest.fixture
def run() -> bench.Run:
    options = bench.parse(["--device", "cpu", "--ranks", "2"])
    return bench.Run(options, time.monotonic() + 100)


def test_a_wrong_result_is_reported_with_the_element(run):
    outcome = bench.run_step(Step("wrong", wrong), run)
    assert outcome.result == bench.FAILED
    assert outcome.error.endswith("a sum: 1 elements differ, at 2 1.0 instead of 2.0")


def test_a_step_that_hangs_is_ended_and_others_run(run):
    outcome = bench.run_step(Step("endless", endless, limit_s=2), run)
    assert (outcome.result, outcome.error) == (bench.TIMEOUT, "ranks [0, 1] did not finish within 2 s")
    outcome = bench.run_step(Step("dying", dying), run)
    assert outcome.result == bench.FAILED and "died with exit code 3" in outcome.error
    by_name = {step.name: step for step in steps()}
    for name in ("streams: all_reduce", "failures: a rank is killed"):
        assert bench.run_step(by_name[name], run).result == bench.OK


def test_a_step_for_which_no_time_is_left_has_not_failed():
    options = bench.parse(["--device", "cpu", "--ranks", "2", "--budget-s", "60"])
    outcome = bench.run_step(Step("endless", endless), bench.Run(options, time.monotonic() + 1))
    assert (outcome.result, outcome.error) == (bench.LEFT_OUT, "the 60 s were over")


def test_what_ran_and_what_failed_is_printed_and_kept(tmp_path, monkeypatch, capfd):
    kept, log = tmp_path / "gpu.json", tmp_path / "gpu.log"
    words = ["--device", "cpu", "--ranks", "2", "--json", str(kept), "--log", str(log), "--steps", "groups"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    monkeypatch.setattr(bench, "parse", lambda parse=bench.parse: parse(words))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert "| collectives: groups | ok " in capfd.readouterr().out
    assert "==== collectives: groups" in log.read_text()
    tables = {table["case"]: table["rows"] for table in json.loads(kept.read_text())["tables"]}
    assert [(row["step"], row["result"]) for row in tables["steps"]] == [("collectives: groups", "ok")]
    assert {"fact": "torch", "value": torch.__version__} in tables["machine"]


def test_curves_that_part_are_told_from_those_that_agree():
    assert largest_difference("a", [2.0, 1.0], [2.0, 1.0], 0.0) == 0.0
    with pytest.raises(AssertionError, match=r"b: at loss 1, 1.1 instead of 1"):
        largest_difference("b", [2.0, 1.1], [2.0, 1.0], 0.05)
    with pytest.raises(AssertionError, match="c: at loss 0, nan instead of 2"):
        largest_difference("c", [float("nan")], [2.0], 0.05)


@pytest.mark.parametrize(("ours", "is_same"), [([True, False], True), ([True, True], False)])
def test_booleans_are_compared_by_their_meaning(ours, is_same):
    here = Session(Setting("cpu", "paceline", ""), 0, 1, torch.device("cpu"), torch.device("cpu"))
    theirs = torch.tensor([2, 0], dtype=torch.uint8).view(torch.bool)
    if is_same:
        compare(here, "bool", [torch.tensor(ours)], [theirs], is_exact=True)
    else:
        with pytest.raises(AssertionError, match="bool: 1 elements differ"):
            compare(here, "bool", [torch.tensor(ours)], [theirs], is_exact=True)
