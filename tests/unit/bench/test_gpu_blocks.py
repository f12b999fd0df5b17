"""The tables of docs/gpu.md, generated from results on several devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))  # after `tests`, because both have a module `hosts`

from publish.gpu_blocks import GPU
from publish.results import Result, Table


def result(name: str, steps: dict[str, str], gpu: str = "", **more: list[dict[str, object]]) -> Result:
    machine = [{"fact": "torch", "value": "2.13"}, *([{"fact": "GPU", "value": gpu}] if gpu else [])]
    rows = [
        {"step": step, "result": told, "error": "rank 1: ValueError: no `x`" if told == "failed" else ""}
        for step, told in steps.items()
    ]
    tables = [Table("The machine", "machine", tuple(machine)), Table("Steps", "steps", tuple(rows))]
    tables += [Table(case, case, tuple(rows)) for case, rows in more.items()]
    return Result(
        name, f"python bench/{name}.py", "2026-11-26", "CPU", {"torch": "2.13"}, "measured", "", tuple(tables)
    )


RESULTS = {
    "gpu-cpu": result("gpu-cpu", {"streams: all_reduce": "ok", "streams: reduce": "ok", "ddp: float32": "ok"}),
    "gpu": result(
        "gpu",
        {
            "streams: all_reduce": "failed",
            "streams: reduce": "ok",
            "ddp: float32": "timeout",
            "graphs: with calls": "ok",
            "ddp: two devices a rank": "left out",
        },
        "NVIDIA H200",
    ),
}


def test_a_step_has_a_column_for_each_device_on_which_it_ran():
    lines = GPU["gpu"](RESULTS).split("\n")
    assert lines[0] == "| | CPU | NVIDIA H200 |"
    assert "| `streams` | 2 / 2 | 1 / 2 |" in lines
    assert "| `ddp: float32` | ok | failed |" in lines
    assert "| `graphs: with calls` | - | ok |" in lines
    assert "| `ddp: two devices a rank` | - | - |" in lines


def test_what_failed_is_listed_with_its_error():
    assert "- `streams: all_reduce`, NVIDIA H200: `rank 1: ValueError: no 'x'`" in GPU["gpu"](RESULTS).split("\n")


def test_figures_come_from_the_run_that_has_them():
    row = {"ranks": 1, "bytes": 1 << 20, "paceline µs": 10.0, "torch µs": 20.0, "ratio": 2.0}
    results = {**RESULTS, "gpu-speed": result("gpu-speed", {}, "NVIDIA H200", all_reduce=[row])}
    assert "| 1 | 1 MiB | 10 | 20 | 2 |" in GPU["gpu-all_reduce"](results).split("\n")
    with pytest.raises(KeyError, match="gpu-host"):
        GPU["gpu-host"](RESULTS)
