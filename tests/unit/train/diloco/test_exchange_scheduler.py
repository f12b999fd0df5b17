"""DiLoCo's state machines in virtual time, and the division of parameters into fragments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_simulation import Simulation, drawn
from sampling import examples

from paceline.train.diloco.exchange_scheduler import (
    FINISHED,
    ArrivalTracker,
    BeginExchange,
    ExchangeInterval,
    ExchangeScheduler,
    Participants,
    UseResult,
    participants_after_waiting,
)


def actions(rhythm: ExchangeInterval, steps: int) -> dict[int, list[object]]:
    scheduler, done = ExchangeScheduler(rhythm), dict[int, list[object]]()
    for step in range(1, steps + 1):
        scheduler.step()
        for action in all_due(scheduler):
            done.setdefault(step, []).append(action)
    return done


def all_due(scheduler: ExchangeScheduler) -> list[BeginExchange | UseResult]:
    done: list[BeginExchange | UseResult] = []
    while (action := scheduler.due()) is not None:
        scheduler.complete(action)
        done.append(action)
    return done


def test_fragments_take_turns_within_a_round():
    assert actions(ExchangeInterval(every=4, fragments=2), 8) == {
        2: [BeginExchange(0), UseResult(0)],
        4: [BeginExchange(1), UseResult(1)],
        6: [BeginExchange(2), UseResult(2)],
        8: [BeginExchange(3), UseResult(3)],
    }


def test_a_result_is_used_some_steps_later():
    assert actions(ExchangeInterval(every=4, fragments=2, delay=3), 9) == {
        2: [BeginExchange(0)],
        4: [BeginExchange(1)],
        5: [UseResult(0)],
        6: [BeginExchange(2)],
        7: [UseResult(1)],
        8: [BeginExchange(3)],
        9: [UseResult(2)],
    }


@given(st.integers(1, 40), st.data())
def test_every_fragment_is_exchanged_once_a_round(every, data):
    rhythm = ExchangeInterval(every, data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1)))
    begun = [
        (step, each.exchange)
        for step, done in actions(rhythm, 3 * every).items()
        for each in done
        if isinstance(each, BeginExchange)
    ]
    for first in range(0, 3 * every, every):
        of_round = [exchange for step, exchange in begun if first < step <= first + every]
        assert sorted(rhythm.fragment(each) for each in of_round) == list(range(rhythm.fragments))
    assert [exchange for _, exchange in begun] == list(range(3 * rhythm.fragments))
    assert rhythm.begun_after(3 * every) == 3 * rhythm.fragments


def test_a_late_rank_takes_the_steps_of_the_others():
    scheduler = ExchangeScheduler(ExchangeInterval(every=10, fragments=2, delay=1))
    scheduler.step()
    scheduler.catch_up(3)  # exchange 2, after 15 steps, took place without this rank
    assert scheduler.steps == 15
    assert all_due(scheduler) == [BeginExchange(0), UseResult(0), BeginExchange(1), UseResult(1), BeginExchange(2)]
    scheduler.step()
    assert scheduler.due() == UseResult(2)


def test_a_rank_that_is_not_late_keeps_its_steps():
    scheduler = ExchangeScheduler(ExchangeInterval(every=2, delay=1))
    for _ in range(2):
        scheduler.step()
    assert all_due(scheduler) == [BeginExchange(0)]
    scheduler.catch_up(1)
    assert scheduler.steps == 2


def test_late_ranks_are_waited_for_only_so_long():
    roll = ArrivalTracker(3, grace_s=5.0)
    assert roll.decide(100.0) is None
    roll.arrived(1, 0, 100.0)
    roll.arrived(0, 0, 104.0)
    assert roll.decide(104.9) is None
    assert roll.due_s() == 105.0
    assert roll.decide(105.0) == Participants((True, True, False))
    roll.arrived(2, 0, 106.0)  # too late: this does not open a window for the next exchange
    assert roll.due_s() is None
    assert roll.decide(1e9) is None


def test_nobody_waits_once_all_are_there():
    roll = ArrivalTracker(2, grace_s=5.0)
    for rank in range(2):
        roll.arrived(rank, 0, 1.0)
    assert roll.decide(1.0) == Participants((True, True))


def test_a_rank_may_be_an_exchange_ahead():
    roll = ArrivalTracker(2, grace_s=5.0)
    roll.arrived(0, 0, 1.0)
    roll.arrived(0, 1, 2.0)
    assert roll.decide(6.0) == Participants((True, False))
    assert roll.due_s() == 7.0
    roll.arrived(1, 1, 6.5)
    assert roll.decide(6.5) == Participants((True, True))


def test_finished_ranks_are_not_waited_for():
    roll = ArrivalTracker(3, grace_s=5.0)
    roll.arrived(0, FINISHED, 1.0)
    roll.arrived(1, 0, 1.0)
    roll.arrived(2, 0, 1.0)
    assert roll.decide(1.0) == Participants((False, True, True))
    roll.arrived(1, FINISHED, 2.0)
    assert roll.decide(2.0) is None
    roll.arrived(2, FINISHED, 3.0)
    assert roll.decide(3.0) == Participants((False, False, False), is_final=True)


def test_ranks_at_different_exchanges_are_refused():
    assert participants_after_waiting([2, 2]) == Participants((True, True))
    assert participants_after_waiting([FINISHED, FINISHED]).is_final
    with pytest.raises(ValueError, match="by rank, the exchanges are 2, 3"):
        participants_after_waiting([2, 3])


def require_sound(simulation: Simulation) -> None:
    held = simulation.held
    for rank in simulation.ranks:
        assert rank.has_left
        assert rank.used == list(range(len(held)))
    for exchange, verdict in enumerate(held):
        assert any(verdict.takes_part), "an exchange was held by nobody"
        for rank, takes_part in zip(simulation.ranks, verdict.takes_part, strict=True):
            assert not takes_part or exchange in rank.offered
    for exchange, decided_s in enumerate(simulation.decided_s):
        before_s = simulation.decided_s[exchange - 1] if exchange else 0.0
        latest_s = max(simulation.first_s[exchange] + simulation.roll._grace_s, before_s + 30.0)
        assert decided_s <= latest_s + 1e-6, "a late rank was waited for longer than the grace window"


def test_any_training_ends_with_the_same_exchanges():
    for seed in range(examples(400)):
        simulation = drawn(seed)
        simulation.run()
        try:
            require_sound(simulation)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_slow_rank_does_not_slow_the_others():
    rhythm = ExchangeInterval(every=8, fragments=2, delay=3)
    simulation = Simulation(rhythm, [[1.0] * 64, [1.0] * 64, [5.0] * 20], 0.5, lambda: 0.01, 0.1)
    simulation.run()
    require_sound(simulation)
    assert max(max(each.waited_s.values(), default=0) for each in simulation.ranks[:2]) < 1
    slow = simulation.ranks[2]
    assert sum(verdict.takes_part[2] for verdict in simulation.held) >= 2, "its progress counts now and then"
    assert slow.scheduler.steps >= 60, "it goes on with the others' number of steps"
