"""Summaries of the steps that were observed."""

from __future__ import annotations

import pytest

from paceline.operate.plan.step_watch import (
    StepNotes,
    TooFewStepsError,
    forwards_of,
    ready_of,
    samples_of,
    times_of,
)


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
