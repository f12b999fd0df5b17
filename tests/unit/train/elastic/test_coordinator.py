"""The views that follow individual events; random schedules are in test_coordinator_schedules.py."""

from __future__ import annotations

import pytest
from elastic_model.play import Play, running

from paceline.train.elastic.protocol import (
    Broken,
    CloseSlotsOrder,
    Dismissed,
    EndOrder,
    FenceStalledOrder,
    Leaving,
    NotifyOrder,
    SendOrder,
    StartOrder,
    WaitNotice,
)


def test_the_first_view_waits_for_all_that_were_started():
    play = Play()
    play.machines(a=3)
    assert play.orders == [StartOrder("a")]
    play.ready("a0", "a1")
    assert not [each for each in play.orders if isinstance(each, SendOrder)]
    play.ready("a2")
    assert play.view().members == ("a0", "a1", "a2") and not play.view().is_planned


def test_the_first_view_waits_for_ten_seconds_at_most():
    play = Play()
    play.machines(a=3)
    play.ready("a0", "a1")
    play.wait(9.9)
    assert play.coordinator.deadline_s == 10.0
    play.wait(0.1)
    assert play.view().members == ("a0", "a1")


def test_a_death_forces_the_others_into_a_view_at_once():
    play = running("a0", "a1", "a2")
    play.kill("a1")
    assert play.view().members == ("a0", "a2")
    assert not play.view().is_planned and not play.view().must_wait


def test_deaths_in_a_row_each_make_a_smaller_view():
    play = running("a0", "a1", "a2", "a3")
    before = play.view().generation
    play.kill("a1", "a0", "a3")
    assert play.view().members == ("a2",)
    assert play.view().generation == before + 3


def test_broken_connections_wait_for_the_death_behind_them():
    play = running("a0", "a1", "a2")
    first = play.view()
    play.say("a0", Broken(first.generation, 3, "lost a1"))
    play.wait(0.2)
    assert play.view() == first
    play.kill("a1")
    assert play.view().members == ("a0", "a2"), "one view, and not two"


def test_broken_connections_alone_bring_the_same_members_back():
    play = running("a0", "a1")
    play.say("a0", Broken(play.view().generation, 3, "reset"))
    play.wait(0.3)
    assert play.view().members == ("a0", "a1") and not play.view().is_planned


def test_connections_that_break_for_ever_end_the_job():
    play = running("a0", "a1")
    for _ in range(6):
        play.say("a0", Broken(play.view().generation, 3, "no route to host"))
        play.wait(0.3)
    assert play.end().code == 1
    assert "more than 5 times" in play.end().reason and "worker a0: no route to host" in play.end().reason


def test_breaks_count_anew_after_a_round():
    play = running("a0", "a1")
    for round_ in range(20):
        play.say("a0", Broken(play.view().generation, round_, "reset"))
        play.wait(0.3)
    assert play.view().members == ("a0", "a1")


def test_newcomers_are_gathered_into_one_planned_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.1)
    play.ready("a3")
    play.wait(0.1)
    assert play.view().members == ("a0", "a1", "a2", "a3") and play.view().is_planned


def test_a_newcomer_without_the_state_is_not_in_a_forced_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.2)
    planned = play.view()
    play.kill("a1")
    assert play.view().members == ("a0",)
    assert play.told("a2") == [planned, play.view()], "it learns that it is out"


def test_a_newcomer_that_has_entered_is_in_a_forced_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.2)
    play.install(play.view(), "a2")
    play.kill("a1")
    assert play.view().members == ("a0", "a2")


def test_a_newcomer_may_turn_out_to_hold_the_state():
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    planned = play.view()
    play.kill("a0")
    assert any(isinstance(each, WaitNotice) for each in play.told("a1")) and play.view() == planned
    play.install(planned, "a1")
    assert play.view().members == ("a1",)


def test_a_newcomer_given_the_state_but_not_the_others_counts():
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    play.kill("a0")
    play.say("a1", Broken(play.view().generation, 5, "lost a0"))
    assert play.view().members == ("a1",)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_newcomer_without_the_state_is_no_truth(says_so):
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    play.kill("a0")
    if says_so:
        play.say("a1", Broken(play.view().generation, -1, "lost a0"))
    else:
        play.wait(10.0)
    assert play.end().code == 1 and "state is lost" in play.end().reason and "a0" in play.end().reason


def test_deaths_before_any_round_begin_the_job_again():
    play = Play()
    play.machines(a=2)
    play.ready("a0", "a1")
    play.install(play.view(), "a0")
    play.kill("a0", "a1")
    play.ready("a2", "a3")
    assert play.view().members == ("a2", "a3") and not play.view().is_planned


def test_an_entry_reported_late_still_counts_as_a_beginning():
    play = Play()
    play.machines(a=2)
    play.ready("a0", "a1")
    first = play.view()
    play.install(first, "a0")
    play.kill("a0")
    play.install(first, "a1")  # it was sent before the second view arrived
    play.kill("a1")
    assert "state is lost" in play.end().reason


def test_one_that_leaves_is_left_out_by_a_planned_view():
    play = running("a0", "a1")
    play.say("a1", Leaving("SIGTERM"))
    view = play.view()
    assert view.members == ("a0",) and view.is_planned and play.told("a1")[-1] == view
    play.kill("a1", code=0)
    assert play.view() == view


def test_leaving_and_a_death_make_one_forced_view():
    play = running("a0", "a1", "a2")
    play.say("a1", Leaving("SIGTERM"))
    play.kill("a2")
    assert play.view().members == ("a0",) and not play.view().is_planned
    assert play.told("a1")[-1] == play.view()


def test_the_last_one_hands_over_before_it_leaves():
    play = running("a0")
    play.ready("a1")
    play.say("a0", Leaving("SIGTERM"))
    both = play.view()
    assert both.members == ("a0", "a1")
    play.install(both)
    assert play.view().members == ("a1",) and play.view().is_planned


def test_the_last_one_leaves_when_nobody_comes():
    play = running("a0")
    play.say("a0", Leaving("SIGTERM"))
    play.wait(10.0)
    assert play.told("a0")[-1] == Dismissed("asked to leave: SIGTERM")
    play.kill("a0", code=0)
    assert play.end().code == 1 and "asked to leave" in play.end().reason


def test_too_few_workers_wait_until_there_are_more():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    assert play.view().must_wait
    play.install(play.view())
    assert isinstance(play.orders[-1], NotifyOrder) and "1 of at least 2 workers" in play.orders[-1].text
    play.ready("a2")
    play.wait(0.2)
    assert play.view().members == ("a0", "a2") and play.view().is_planned and not play.view().must_wait


def test_too_few_workers_end_when_no_other_can_come():
    play = running("a0", "a1", min_workers=2)
    play.machines(b=1, c=1)
    for machine in "abc":
        play.take(play.coordinator.slots_changed(machine, 0, play.now_s))
    play.kill("a1")
    play.install(play.view())
    assert play.end().code == 1 and "1 of at least 2" in play.end().reason


def test_too_few_workers_wait_ten_minutes_at_most():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    play.install(play.view())
    play.wait(599.0)
    assert not isinstance(play.orders[-1], EndOrder)
    play.wait(1.0)
    assert "1 of at least 2 workers are left, and waited 600 s" in play.end().reason


def test_a_worker_of_other_bits_is_refused_with_both_texts():
    play = running("a0", "a1")
    play.machines(b=1)
    play.ready("b0", fingerprint="other")
    dismissed = play.told("b0")[-1]
    assert isinstance(dismissed, Dismissed) and dismissed.code == 2
    assert "'other'" in dismissed.reason and "'same'" in dismissed.reason
    assert any(isinstance(each, CloseSlotsOrder) and each.machine == "b" for each in play.orders)


def test_at_the_start_the_majority_decides_which_bits():
    play = Play()
    play.machines(a=3)
    play.ready("a0", fingerprint="other")
    play.ready("a1", "a2")
    assert play.view().members == ("a1", "a2")
    assert isinstance(play.told("a0")[-1], Dismissed)


def stopped(play: Play, uid: str) -> None:
    play.take(play.coordinator.worker_stalled(uid, "stopped", play.now_s))


def fenced(play: Play) -> list[str]:
    return [order.uid for order in play.orders if isinstance(order, FenceStalledOrder)]


def test_a_stopped_worker_is_killed_when_the_others_go_on():
    play = running("a0", "b0", "b1")
    stopped(play, "a0")
    assert play.view().members == ("b0", "b1") and fenced(play) == ["a0"]
    stopped(play, "a0")
    play.wait(5.0)
    assert fenced(play) == ["a0"], "once"


def test_the_only_worker_with_the_state_may_be_stopped():
    play = running("a0", "b0")
    first = play.view()
    play.kill("b0")
    play.install(play.view())
    play.ready("b1")
    stopped(play, "a0")
    told = [order.text for order in play.orders if isinstance(order, NotifyOrder)][-1]
    assert told == "waiting for a0: it is stopped, and no other worker holds the job's state; send it SIGCONT"
    assert play.coordinator.deadline_s is None
    play.wait(1000.0)
    assert fenced(play) == [] and not any(isinstance(order, EndOrder) for order in play.orders)
    play.take(play.coordinator.worker_started("a0", "a", play.now_s))
    play.wait(1.0)
    assert play.view().members == ("a0", "b1") and play.view().generation > first.generation


def test_of_two_that_are_stopped_at_once_one_is_left_alone():
    play = running("a0", "b0")
    stopped(play, "a0")
    stopped(play, "b0")
    assert fenced(play) == ["a0"]
    play.kill("a0")
    play.wait(1000.0)
    assert fenced(play) == ["a0"]
    play.take(play.coordinator.worker_started("b0", "b", play.now_s))
    assert play.view().members == ("b0",) and play.view().is_planned is False


def test_a_stopped_worker_that_is_killed_is_not_awaited():
    play = running("a0")
    stopped(play, "a0")
    play.kill("a0")
    assert "The job's state is lost" in play.end().reason


def test_a_stopped_worker_without_the_state_is_killed():
    play = running("a0")
    play.machines(b=1)
    play.ready("b0")
    stopped(play, "b0")
    assert fenced(play) == ["b0"]
    play.take(play.coordinator.worker_started("b0", "b", play.now_s))
    stopped(play, "b0")
    assert fenced(play) == ["b0", "b0"], "it had been continued meanwhile"
