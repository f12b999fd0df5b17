"""Machines that are lost, return, or leave, and the end of the job."""

from __future__ import annotations

from elastic_model.play import running

from paceline.operate.launch.elastic.machine_log import ReplayableMessages
from paceline.train.elastic.protocol import (
    EndOrder,
    ExitRequest,
    LoopFinished,
    NotifyOrder,
    ViewInstalled,
    WaitNotice,
    WorkerReady,
)


def test_the_job_ends_when_all_have_finished_and_ended():
    play = running("a0", "a1")
    for uid in ("a0", "a1"):
        play.say(uid, LoopFinished(9))
    play.kill("a0", code=0)
    assert not isinstance(play.orders[-1], EndOrder), "a1 may still be writing a file"
    play.kill("a1", code=0)
    assert play.end() == EndOrder(0)


def test_one_finished_and_one_died_is_a_good_end():
    play = running("a0", "a1")
    play.say("a0", LoopFinished(9))
    play.kill("a1")
    play.kill("a0", code=0)
    assert play.end() == EndOrder(0)


def test_a_failure_after_the_loop_is_the_jobs():
    play = running("a0")
    play.say("a0", LoopFinished(9))
    play.kill("a0", code=3)
    assert play.end().code == 3 and "a0" in play.end().reason


def test_late_workers_are_dismissed_when_one_has_finished():
    play = running("a0", "a1")
    play.ready("a2")
    play.say("a0", LoopFinished(9))
    assert play.told("a2") == [ExitRequest("the job has finished")]
    play.ready("a3")
    assert play.told("a3") == [ExitRequest("the job has finished")]


def test_the_majority_goes_on_without_a_machine():
    play = running("a0", "a1", "b0")
    play.lose("b")
    assert play.view().members == ("a0", "a1")


def test_the_minority_waits_and_says_for_whom():
    play = running("a0", "b0", "b1")
    first = play.view()
    play.lose("b")
    assert play.view() == first and isinstance(play.told("a0")[-1], WaitNotice)
    assert "b0, b1" in [each.text for each in play.orders if isinstance(each, NotifyOrder)][-1]
    play.wait(120.0)
    assert play.end().code == 1 and "host-b" in play.end().reason


def test_a_machine_that_comes_back_in_time_loses_nothing():
    play = running("a0", "b0", "b1")
    view = play.view()
    play.lose("b")
    standing = ReplayableMessages([WorkerReady("same"), ViewInstalled(view.generation, 0)])
    play.come_back("b", b0=standing, b1=standing)
    play.wait(200.0)
    assert play.view() == view and not isinstance(play.orders[-1], EndOrder)
    play.kill("a0")
    assert play.view().members == ("b0", "b1")


def test_a_machine_that_comes_back_late_learns_that_it_is_out():
    play = running("a0", "a1", "b0")
    first = play.view()
    play.lose("b")
    view = play.view()
    play.come_back("b", b0=ReplayableMessages([WorkerReady("same"), ViewInstalled(first.generation, 0)]))
    assert play.told("b0")[-1] == view
    play.install(view)
    play.wait(0.2)
    assert play.view() == view, "its old readiness does not count"
    play.say("b0", WorkerReady("same"))
    play.wait(0.2)
    assert play.view().members == ("a0", "a1", "b0") and play.view().is_planned


def test_a_worker_that_a_returning_machine_does_not_name_is_dead():
    play = running("a0", "b0", "b1")
    play.lose("b")
    play.come_back("b", b0=ReplayableMessages([WorkerReady("same"), ViewInstalled(play.view().generation, 0)]))
    assert play.view().members == ("a0", "b0")


def test_a_stopped_worker_is_left_out_and_may_come_back():
    play = running("a0", "a1")
    play.take(play.coordinator.worker_stalled("a1", "stopped", play.now_s))
    play.install(play.view())
    assert play.view().members == ("a0",)
    play.say("a1", WorkerReady("same"))
    play.wait(0.2)
    assert play.view().members == ("a0", "a1")


def test_the_only_worker_is_waited_for_when_it_is_stopped():
    play = running("a0")
    view = play.view()
    play.take(play.coordinator.worker_stalled("a0", "stopped", play.now_s))
    play.wait(60.0)
    play.take(play.coordinator.worker_started("a0", "a", play.now_s))
    play.wait(100.0)
    assert play.view() == view and play.told("a0")[-1] == view


def test_nothing_follows_the_end():
    play = running("a0")
    play.kill("a0")
    end = play.end()
    play.orders.clear()
    play.ready("a1")
    play.machines(b=1)
    play.wait(1000.0)
    assert play.orders == [end] and play.coordinator.deadline_s is None, "the machine that comes learns of it"
