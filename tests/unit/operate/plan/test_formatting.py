"""Tables and JSON of predictions."""

from __future__ import annotations

import json
import re

import pytest
from planned import calibration, prediction

from paceline.operate.plan.formatting import advice_text, facts_of, format_bytes, table_text
from paceline.operate.plan.prediction import Advice, Change


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


def test_sizes_are_spelled_with_their_unit():
    assert [format_bytes(each) for each in (512, 1536, 3 << 30)] == ["512 B", "1.5 KiB", "3 GiB"]
