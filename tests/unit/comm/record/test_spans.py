"""Spans and numbers that a program records."""

from __future__ import annotations

from recorded_programs import recorded, run

from paceline.comm.record.layout import EventKind


def test_spans_and_numbers_are_recorded_with_their_step(tmp_path):
    code = """
import paceline, torch
from paceline.comm.record.spans import STEPS
class Loop: pass
loop, other = Loop(), Loop()
STEPS.begin(loop, "mine")
STEPS.begin(other, "not the maker")
@paceline.span("whole")
def function():
    with paceline.span("part"):
        paceline.log(loss=torch.ones(1, requires_grad=True) / 4, lr=3)
function()
STEPS.begin(loop, "mine")
"""
    recording = recorded(code, tmp_path)
    assert recording.step == 2
    facts = [(event.kind, event.name, event.value, event.step) for event in recording.events]
    assert facts == [
        (EventKind.STEP, "mine", None, 1),
        (EventKind.SPAN, "whole", None, 1),
        (EventKind.SPAN, "part", None, 1),
        (EventKind.VALUE, "loss", 0.25, 1),
        (EventKind.VALUE, "lr", 3.0, 1),
        (EventKind.STEP, "mine", None, 2),
    ]
    (open_step,) = recording.open_events()
    assert open_step.first == 2
    assert recording.events[1].start_ns <= recording.events[2].start_ns <= recording.events[2].end_ns


def test_a_value_that_is_no_number_is_refused(tmp_path):
    done = run("import paceline; paceline.log(loss='much')", tmp_path)
    assert "paceline.log: loss is a str that cannot be converted to one number" in done.stderr
