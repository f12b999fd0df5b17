"""The `--chaos` option: faults at random times from one seed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.operate.launch.elastic_options import Chaos, ChaosAction, actions_of


def test_chaos_says_what_it_was_asked_for():
    chaos = Chaos.parse("kill:2s, stop:5,seed=7")
    assert chaos == Chaos((("kill", 2.0), ("stop", 5.0)), 7)
    assert str(chaos) == "kill:2s,stop:5s,seed=7"
    assert Chaos.parse(str(chaos)) == chaos


@pytest.mark.parametrize("text", ["", "seed=7", "kill", "kill:0s", "kill:-1s", "kill:inf", "maim:2s", "kill:1,kill:2"])
def test_chaos_that_means_nothing_is_refused(text):
    with pytest.raises(ArgumentTypeError):
        Chaos.parse(text)


@given(st.integers(0, 1000), st.integers(0, 3))
def test_chaos_with_one_seed_is_always_the_same(seed: int, machine: int) -> None:
    chaos = Chaos((("kill", 2.0), ("stop", 5.0)), seed)
    actions = list(islice(actions_of(chaos, machine), 50))
    assert actions == list(islice(actions_of(chaos, machine), 50))
    assert actions == sorted(actions, key=lambda action: action.at_s)
    assert actions != list(islice(actions_of(chaos, machine + 1), 50))
    assert all(action.victim_of("abc") in "abc" for action in actions)


def test_chaos_keeps_to_its_mean_times():
    actions = list(islice(actions_of(Chaos((("kill", 2.0), ("stop", 8.0)), 1)), 5000))
    kills = [action for action in actions if action.kind == "kill"]
    assert actions[-1].at_s / len(kills) == pytest.approx(2.0, rel=0.1)
    assert len(kills) / len(actions) == pytest.approx(0.8, abs=0.05)


def test_every_worker_may_be_hit():
    actions = islice(actions_of(Chaos((("kill", 1.0),), 3)), 200)
    assert {action.victim_of(range(4)) for action in actions} == {0, 1, 2, 3}
    assert ChaosAction(0.0, "kill", 0.999999).victim_of("abc") == "c"
