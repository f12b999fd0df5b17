"""The views that result from individual events; random schedules are in test_coordinator_schedules.py."""

from __future__ import annotations

from elastic_model.play import Play, running


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
    play.install(first, "a1")  # sent before the second view arrived
    play.kill("a1")
    assert "state is lost" in play.end().reason
