"""The report of a plan."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from planned import calibration, prediction

from paceline.operate.plan.report import HeatRow, heat_map, report, scaling_curve, step_bars


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
