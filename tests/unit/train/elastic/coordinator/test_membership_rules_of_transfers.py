"""State transfers as planned by the coordinator: senders, receivers, and the time at which a receiver joins."""

from __future__ import annotations

from elastic_model.play import Play, running

from paceline.operate.launch.elastic.machine_log import ReplayableMessages
from paceline.train.elastic.protocol import (
    CaughtUp,
    SendOrder,
    StateTransfer,
    TransferOffer,
    TransferReady,
    View,
    WorkerReady,
)


def comes(play: Play, uid: str) -> None:
    play.take(play.coordinator.worker_started(uid, uid[0], play.now_s))
    play.say(uid, WorkerReady("same", can_catch_up=True))


def transfers(play: Play, uid: str) -> list[StateTransfer]:
    return [each for each in play.told(uid) if isinstance(each, StateTransfer)]


def offers(play: Play, uid: str) -> list[TransferOffer]:
    return [each for each in play.told(uid) if isinstance(each, TransferOffer)]


def views(play: Play, uid: str) -> list[View]:
    return [each for each in play.told(uid) if isinstance(each, View)]


def test_a_learner_has_two_donors_its_own_machines_first():
    play = running("a0", "a1", "b0", "b1")
    comes(play, "b2")
    (transfer,) = transfers(play, "a0")
    assert (transfer.receiver, transfer.senders) == ("b2", ("b0", "b1"))
    assert all(transfers(play, uid) == [transfer] for uid in ("a0", "a1", "b0", "b1")), "all members hear of it"
    play.wait(5.0)
    assert views(play, "b2") == [], "nobody waits for it meanwhile"


def test_a_learner_hears_of_each_donor_before_it_comes_in():
    play = running("a0", "b0")
    comes(play, "a1")
    (transfer,) = transfers(play, "b0")
    for uid in ("a0", "b0"):
        play.say(uid, TransferReady(transfer.number, 7, f"{uid}:1"))
    assert offers(play, "a1") == [TransferOffer(transfer.number, uid, 7, f"{uid}:1") for uid in ("a0", "b0")]
    play.say("a1", CaughtUp(9))
    view = play.view()
    assert view.members == ("a0", "a1", "b0")
    assert view.is_planned
    assert view.generation > transfer.number


def test_numbers_of_lessons_and_views_are_one_sequence():
    play = running("a0", "a1")
    first = play.view().generation
    comes(play, "a2")
    comes(play, "a3")
    assert [each.number for each in transfers(play, "a0")] == [first + 1, first + 2]


def test_who_cannot_be_taught_is_given_the_state_while_all_wait():
    play = running("a0", "a1")
    comes(play, "a2")
    (transfer,) = transfers(play, "a0")
    play.say("a0", TransferReady(transfer.number, 7, ""))
    play.wait(1.0)
    assert views(play, "a2") == []
    play.say("a1", TransferReady(transfer.number, 7, ""))
    play.wait(1.0)
    assert views(play, "a2")[-1].members == ("a0", "a1", "a2")


def test_donors_that_die_before_they_answer_are_replaced():
    play = running("a0", "a1", "b0", "b1")
    comes(play, "a2")
    play.kill("a0", "a1")
    play.install(play.view())
    first, second = transfers(play, "b0")
    assert (first.senders, second.senders) == (("a0", "a1"), ("b0", "b1"))


def test_a_learner_that_lost_its_donors_asks_again():
    play = running("a0", "a1")
    comes(play, "a2")
    (first,) = transfers(play, "a0")
    play.say("a0", TransferReady(first.number, 7, "a0:1"))
    play.say("a2", WorkerReady("same", can_catch_up=True, after=first.number))
    assert len(transfers(play, "a0")) == 2
    play.say("a0", TransferReady(first.number, 7, "a0:1"))
    assert len(offers(play, "a2")) == 1, "what belongs to the transfer before is over"


def test_a_job_that_waits_for_workers_does_not_wait_for_lessons():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    play.install(play.view())
    comes(play, "a2")
    play.wait(1.0)
    assert transfers(play, "a0") == []
    assert views(play, "a2")[-1].members == ("a0", "a2")


def test_a_machine_that_comes_back_hears_of_lessons_again():
    play = running("a0", "b0", "b1")
    comes(play, "b2")
    (transfer,) = transfers(play, "b0")
    play.say("b0", TransferReady(transfer.number, 7, "b0:1"))
    play.lose("b")  # a0 cannot continue without it
    before = len(play.orders)
    play.come_back("b", b0=ReplayableMessages(), b1=ReplayableMessages(), b2=ReplayableMessages())
    again = [order for order in play.orders[before:] if isinstance(order, SendOrder)]
    assert [order.uid for order in again if order.message == transfer] == ["b0", "b1"]
    assert [order.message for order in again if order.uid == "b2" and isinstance(order.message, TransferOffer)]


def test_a_standing_holds_what_a_learner_and_a_donor_have_said():
    standing = ReplayableMessages()
    said = [
        WorkerReady("same", can_catch_up=True),
        CaughtUp(3),
        TransferReady(5, 3, "x:1"),
        TransferReady(6, 4, "x:2"),
        CaughtUp(4),
    ]
    for message in said:
        standing.receive(message)
    assert standing.messages == [said[0], said[2], said[3], said[4]]
    for number in range(7, 20):
        standing.receive(TransferReady(number, 4, "x:3"))
    assert len(standing.messages) < 8
