"""Connections that fail repeatedly."""

from __future__ import annotations

from elastic_model.play import running

from paceline.train.elastic.protocol import (
    ViewFailed,
)


def test_broken_connections_wait_for_the_death_behind_them():
    play = running("a0", "a1", "a2")
    first = play.view()
    play.say("a0", ViewFailed(first.generation, 3, "lost a1"))
    play.wait(0.2)
    assert play.view() == first
    play.kill("a1")
    assert play.view().members == ("a0", "a2"), "one view, and not two"


def test_broken_connections_alone_bring_the_same_members_back():
    play = running("a0", "a1")
    play.say("a0", ViewFailed(play.view().generation, 3, "reset"))
    play.wait(0.3)
    assert play.view().members == ("a0", "a1") and not play.view().is_planned


def test_connections_that_break_for_ever_end_the_job():
    play = running("a0", "a1")
    for _ in range(6):
        play.say("a0", ViewFailed(play.view().generation, 3, "no route to host"))
        play.wait(0.3)
    assert play.end().code == 1
    assert "more than 5 times" in play.end().reason and "worker a0: no route to host" in play.end().reason


def test_breaks_count_anew_after_a_round():
    play = running("a0", "a1")
    for round_ in range(20):
        play.say("a0", ViewFailed(play.view().generation, round_, "reset"))
        play.wait(0.3)
    assert play.view().members == ("a0", "a1")
