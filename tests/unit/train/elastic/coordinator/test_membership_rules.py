"""Rules by which the coordinator admits workers, waits for them, and ends the job."""

from __future__ import annotations

import json

import pytest
from elastic_model.play import Play, running

from paceline.train.elastic.coordinator.membership_rules import differences_of
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    EndOrder,
    ExitRequest,
    LeaveNotice,
    NotifyOrder,
    SendOrder,
    StartOrder,
    ViewFailed,
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
    play.say("a1", ViewFailed(play.view().generation, 5, "lost a0"))
    assert play.view().members == ("a1",)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_newcomer_without_the_state_is_no_truth(says_so):
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    play.kill("a0")
    if says_so:
        play.say("a1", ViewFailed(play.view().generation, -1, "lost a0"))
    else:
        play.wait(10.0)
    assert play.end().code == 1 and "state is lost" in play.end().reason and "a0" in play.end().reason


def test_one_that_leaves_is_left_out_by_a_planned_view():
    play = running("a0", "a1")
    play.say("a1", LeaveNotice("SIGTERM"))
    view = play.view()
    assert view.members == ("a0",) and view.is_planned and play.told("a1")[-1] == view
    play.kill("a1", code=0)
    assert play.view() == view


def test_leaving_and_a_death_make_one_forced_view():
    play = running("a0", "a1", "a2")
    play.say("a1", LeaveNotice("SIGTERM"))
    play.kill("a2")
    assert play.view().members == ("a0",) and not play.view().is_planned
    assert play.told("a1")[-1] == play.view()


def test_the_last_one_hands_over_before_it_leaves():
    play = running("a0")
    play.ready("a1")
    play.say("a0", LeaveNotice("SIGTERM"))
    both = play.view()
    assert both.members == ("a0", "a1")
    play.install(both)
    assert play.view().members == ("a1",) and play.view().is_planned


def test_the_last_one_leaves_when_nobody_comes():
    play = running("a0")
    play.say("a0", LeaveNotice("SIGTERM"))
    play.wait(10.0)
    assert play.told("a0")[-1] == ExitRequest("asked to leave: SIGTERM")
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
    assert isinstance(dismissed, ExitRequest) and dismissed.code == 2
    assert "'other'" in dismissed.reason and "'same'" in dismissed.reason
    assert any(isinstance(each, CloseSlotsOrder) and each.machine == "b" for each in play.orders)


def test_a_worker_of_another_model_is_told_what_differs():
    own = {"torch.__version__": "2.13", "parameter 'w'": "of shape [2, 3] and torch.float32", "buffer 'n'": "of shape"}
    job = {"torch.__version__": "2.13", "parameter 'w'": "of shape [3] and torch.float64", "parameter 'b'": "of shape"}
    play = Play()
    play.machines(a=2)
    play.ready("a0", "a1", fingerprint=json.dumps(job))
    play.machines(b=1)
    play.ready("b0", fingerprint=json.dumps(own))
    reason = play.told("b0")[-1].reason
    assert "'w' is of shape [2, 3] and torch.float32 there, and of shape [3] and torch.float64 in the job;" in reason
    assert "buffer 'n' (of shape) exists only there; parameter 'b' (of shape) exists only in the job. Use" in reason
    assert "version" not in reason and "{" not in reason
    assert differences_of('{"a": "1", "b": "2"}', '{"b": "2", "a": "1"}') == "the order of the parameters differs"
    many = {f"parameter {number}": "of shape [1]" for number in range(5)}
    assert differences_of(json.dumps(many), "{}").endswith("parameter 2 (of shape [1]) exists only there; and 2 more")


def test_at_the_start_the_majority_decides_which_bits():
    play = Play()
    play.machines(a=3)
    play.ready("a0", fingerprint="other")
    play.ready("a1", "a2")
    assert play.view().members == ("a1", "a2")
    assert isinstance(play.told("a0")[-1], ExitRequest)
