"""Stopped workers, and the conditions under which they may return."""

from __future__ import annotations

from elastic_model.play import Play, running

from paceline.train.elastic.protocol import (
    EndOrder,
    FenceStalledOrder,
    NotifyOrder,
)


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
