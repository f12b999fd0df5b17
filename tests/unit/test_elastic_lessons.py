"""Lessons as the coordinator gives them: who teaches whom, and when a learner comes in."""

from __future__ import annotations

from elastic_model.play import Play, running

from paceline.elastic.messages import Donating, Learn, Learned, Lesson, Ready, View
from paceline.elastic.orders import Tell
from paceline.elastic.standing import Standing


def comes(play: Play, uid: str) -> None:
    play.take(play.coordinator.worker_started(uid, uid[0], play.now_s))
    play.say(uid, Ready("same", learns=True))


def lessons(play: Play, uid: str) -> list[Lesson]:
    return [each for each in play.told(uid) if isinstance(each, Lesson)]


def offers(play: Play, uid: str) -> list[Learn]:
    return [each for each in play.told(uid) if isinstance(each, Learn)]


def views(play: Play, uid: str) -> list[View]:
    return [each for each in play.told(uid) if isinstance(each, View)]


def test_a_learner_has_two_donors_its_own_machines_first():
    play = running("a0", "a1", "b0", "b1")
    comes(play, "b2")
    (lesson,) = lessons(play, "a0")
    assert (lesson.learner, lesson.donors) == ("b2", ("b0", "b1"))
    assert all(lessons(play, uid) == [lesson] for uid in ("a0", "a1", "b0", "b1")), "all members hear of it"
    play.wait(5.0)
    assert views(play, "b2") == [], "nobody waits for it meanwhile"


def test_a_learner_hears_of_each_donor_before_it_comes_in():
    play = running("a0", "b0")
    comes(play, "a1")
    (lesson,) = lessons(play, "b0")
    for uid in ("a0", "b0"):
        play.say(uid, Donating(lesson.number, 7, f"{uid}:1"))
    assert offers(play, "a1") == [Learn(lesson.number, uid, 7, f"{uid}:1") for uid in ("a0", "b0")]
    play.say("a1", Learned(9))
    view = play.view()
    assert view.members == ("a0", "a1", "b0")
    assert view.is_planned
    assert view.generation > lesson.number


def test_numbers_of_lessons_and_views_are_one_sequence():
    play = running("a0", "a1")
    first = play.view().generation
    comes(play, "a2")
    comes(play, "a3")
    assert [each.number for each in lessons(play, "a0")] == [first + 1, first + 2]


def test_who_cannot_be_taught_is_given_the_state_while_all_wait():
    play = running("a0", "a1")
    comes(play, "a2")
    (lesson,) = lessons(play, "a0")
    play.say("a0", Donating(lesson.number, 7, ""))
    play.wait(1.0)
    assert views(play, "a2") == []
    play.say("a1", Donating(lesson.number, 7, ""))
    play.wait(1.0)
    assert views(play, "a2")[-1].members == ("a0", "a1", "a2")


def test_donors_that_die_before_they_answer_are_replaced():
    play = running("a0", "a1", "b0", "b1")
    comes(play, "a2")
    play.kill("a0", "a1")
    play.install(play.view())
    first, second = lessons(play, "b0")
    assert (first.donors, second.donors) == (("a0", "a1"), ("b0", "b1"))


def test_a_learner_that_lost_its_donors_asks_again():
    play = running("a0", "a1")
    comes(play, "a2")
    (first,) = lessons(play, "a0")
    play.say("a0", Donating(first.number, 7, "a0:1"))
    play.say("a2", Ready("same", learns=True, after=first.number))
    assert len(lessons(play, "a0")) == 2
    play.say("a0", Donating(first.number, 7, "a0:1"))
    assert len(offers(play, "a2")) == 1, "what belongs to the lesson before is over"


def test_a_job_that_waits_for_workers_does_not_wait_for_lessons():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    play.install(play.view())
    comes(play, "a2")
    play.wait(1.0)
    assert lessons(play, "a0") == []
    assert views(play, "a2")[-1].members == ("a0", "a2")


def test_a_machine_that_comes_back_hears_of_lessons_again():
    play = running("a0", "b0", "b1")
    comes(play, "b2")
    (lesson,) = lessons(play, "b0")
    play.say("b0", Donating(lesson.number, 7, "b0:1"))
    play.lose("b")  # without which a0 cannot go on
    before = len(play.orders)
    play.come_back("b", b0=Standing(), b1=Standing(), b2=Standing())
    again = [order for order in play.orders[before:] if isinstance(order, Tell)]
    assert [order.uid for order in again if order.message == lesson] == ["b0", "b1"]
    assert [order.message for order in again if order.uid == "b2" and isinstance(order.message, Learn)]


def test_a_standing_holds_what_a_learner_and_a_donor_have_said():
    standing = Standing()
    said = [Ready("same", learns=True), Learned(3), Donating(5, 3, "x:1"), Donating(6, 4, "x:2"), Learned(4)]
    for message in said:
        standing.heard(message)
    assert standing.messages == [said[0], said[2], said[3], said[4]]
    for number in range(7, 20):
        standing.heard(Donating(number, 4, "x:3"))
    assert len(standing.messages) < 8
