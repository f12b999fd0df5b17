"""The frequency of checks, and the optimizer steps that the checks observe."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.train.checks.finite_check import (
    DeviceOutcome,
)
from paceline.train.checks.optimizer_steps import CheckInterval, StepClock


def test_a_check_takes_no_more_than_its_share():
    pace, spent_s, step = CheckInterval(0.01), 0.0, 1
    while step < 10_000:
        if pace.is_due(step):
            spent_s += 0.004
            pace.plan(step, 0.004, 0.02)
        step += 1
    assert 0.005 < spent_s / (10_000 * 0.02) <= 0.0101


def test_one_slow_check_does_not_put_off_the_next_for_long():
    pace = CheckInterval(0.01)
    pace.plan(1, 0.001, 0.1)
    assert pace.next == 2
    pace.plan(2, 100.0, 0.1)
    assert pace.next == 4


def test_a_fixed_pace_ignores_costs():
    pace = CheckInterval(0.01, first=10, least=100, fixed=3)
    assert not pace.is_due(2)
    assert pace.is_due(3)
    pace.plan(3, 100.0, math.inf)
    assert pace.next == 6


def test_a_step_takes_as_long_as_the_shortest_of_late():
    clock = StepClock()
    for now_s in (0, 5, 6, 16):
        clock.tick(now_s)
    assert 1 <= clock.shortest_s <= 1.02
    for now_s in range(20, 2000, 4):
        clock.tick(now_s)
    assert clock.shortest_s == pytest.approx(4, rel=0.02)


def test_a_step_is_applied_unless_it_was_left_out():
    for found_inf, is_applied in ((None, True), (torch.zeros(1), True), (torch.ones(()), False)):
        outcome = DeviceOutcome(1, [])
        outcome.note_step(found_inf)
        assert outcome.is_complete()
        outcome.read()
        assert outcome.is_applied is is_applied
