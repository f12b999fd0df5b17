"""The calibration file, measurements of steps, and the output of the command and its report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from planned import calibration, prediction

from paceline.cli.main import main
from paceline.operate.plan.calibration import CalibrationError, decode, encode, read, relative_spread
from paceline.operate.plan.formatting import advice_text, facts_of, format_bytes, table_text
from paceline.operate.plan.prediction import Advice, Change
from paceline.operate.plan.report import HeatRow, heat_map, report, scaling_curve, step_bars
from paceline.operate.plan.step_watch import (
    StepNotes,
    TooFewStepsError,
    forwards_of,
    ready_of,
    samples_of,
    times_of,
)


def test_a_calibration_survives_its_file(tmp_path):
    found = calibration()
    path = tmp_path / "calibration.json"
    path.write_bytes(encode(found))
    assert read(path) == found
    assert '"forward_s": 0.015' in path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"version": 1', '"version": 2', "has version 2, but this version of Paceline reads 1; measure again"),
        ('"forward_s": 0.015', '"forward_s": "fast"', r"Expected `float`, got `str` - at `\$.times.forward_s`"),
        ('"forward_s": 0.015', '"forward_s": -1', "a time or a size is negative"),
        ('"forwards": 1', '"forwards": 0', "forwards must be at least 1"),
        ("{", "", "is not a calibration that `paceline plan --measure` writes"),
    ],
)
def test_a_wrong_calibration_says_what_is_wrong(old, new, complaint):
    content = encode(calibration()).decode()
    assert old in content
    with pytest.raises(CalibrationError, match=complaint):
        decode(content.replace(old, new, 1).encode(), "calibration.json")


def test_the_spread_is_relative_to_the_median():
    assert relative_spread([2.0, 1.0, 4.0]) == [0.5, 1.0, 2.0]
    assert relative_spread([1.0, 3.0, 2.0, 2.0], in_a_row=2) == [1.0, 1.0]
    assert relative_spread([1.0], in_a_row=16) == [1.0]


def notes(seconds: float, forward: float, backward: float, forwards: int = 1) -> StepNotes:
    return StepNotes(
        10.0,
        10.0 + seconds,
        data_s=0.5,
        forward_s=[forward] * forwards,
        backward_s=[backward] * forwards,
        optimizer_s=1.0,
        ready_s={"weight": backward},
        samples=8.0 * forwards,
    )


def test_steps_are_summed_up_by_their_medians():
    steps = [notes(10, 2, 3), notes(12, 2, 4), notes(40, 9, 5)]
    found = times_of(steps)
    assert (found.data_s, found.forward_s, found.backward_s, found.optimizer_s) == (0.5, 2, 4, 1)
    assert found.rest_s == 4.5
    assert ready_of(steps) == {"weight": 4}
    assert (forwards_of(steps), samples_of(steps)) == (1, 8)
    assert forwards_of([notes(20, 2, 3, forwards=4)]) == 4


def test_a_script_that_does_not_train_is_named():
    with pytest.raises(TooFewStepsError, match="0 optimizer steps were observed"):
        times_of([])
    with pytest.raises(TooFewStepsError, match="1 optimizer steps were observed, but none included a forward"):
        times_of([StepNotes(0.0, 1.0)])


def test_the_table_has_a_line_for_each_number_of_nodes():
    lines = table_text([prediction(calibration(), nodes) for nodes in (1, 2)]).splitlines()
    assert lines[0].split() == [
        "nodes", "ranks", "step", "p5-p95", "samples/s", "efficiency", "memory", "bottleneck", "algorithm", "traffic",
        "hidden", "node-hours",
    ]  # fmt: skip
    assert lines[1].split()[:4] == ["1", "1", "50", "ms"]
    assert re.search(r"^ *2 +2 +63 ms +59.6 ms - 69.8 ms +1,016 +79% +210 MiB", lines[2])


def test_advice_names_the_change_and_what_it_costs():
    found = prediction(calibration())
    change = Change('wire="int8"', "gradients are rounded", found.strategy, 1)
    text = advice_text(2, [Advice(change, found, 0.25, 1 << 20)])
    assert re.search(r'wire="int8" +\+25% +63 ms +210 MiB \(-1 MiB\)  gradients are rounded', text)
    assert "none of the changes" in advice_text(2, [])


def test_what_programs_get_is_json():
    facts = json.loads(json.dumps(facts_of(prediction(calibration()))))
    assert facts["step_s"] == pytest.approx(0.063)
    assert facts["parts_s"]["exposed_communication"] == pytest.approx(0.013)
    assert sum(facts["parts_s"].values()) == pytest.approx(facts["step_s"])


def test_sizes_are_spelt_with_their_unit():
    assert [format_bytes(each) for each in (512, 1536, 3 << 30)] == ["512 B", "1.5 KiB", "3 GiB"]


def test_pictures_are_well_formed():
    predictions = [prediction(calibration(samples=samples), nodes) for samples in (None, 8.0) for nodes in (1, 2, 4)]
    for drawn in (
        scaling_curve(predictions[:3]),
        scaling_curve(predictions[3:]),
        scaling_curve(predictions[:1]),
        step_bars(predictions),
        heat_map([HeatRow(2, (0.5, 1.2))], ["1 Gbit/s", "2 Gbit/s"]),
    ):
        assert ElementTree.fromstring(drawn).tag == "svg"


def test_the_report_needs_nothing_else():
    found = calibration(origin=replace(calibration().origin, command=("<train>.py",)))
    predictions = [prediction(found, nodes) for nodes in (1, 2)]
    page = report(found, predictions, [], [HeatRow(2, (0.5,) * 5)], "made today").decode()
    assert "&lt;train&gt;.py" in page and "<train>" not in page
    assert "<script" not in page and "src=" not in page and "http://" not in page and "https://" not in page
    assert page.count("<svg") == page.count("</svg>") == 3


def test_a_plan_without_a_calibration_says_so(capsys, tmp_path):
    assert main(["plan"]) == 2
    assert "pass one calibration" in capsys.readouterr().err
    assert main(["plan", "--measure"]) == 2
    assert "the script to measure follows the flags" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_predicting_needs_no_torch():
    modules = "paceline.operate.plan.report, paceline.operate.plan.prediction, paceline.cli.plan"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
