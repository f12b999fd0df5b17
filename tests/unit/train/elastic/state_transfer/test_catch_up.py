"""The log that senders keep after a snapshot, and the receiver that replays the log until it has caught up."""

from __future__ import annotations

import threading

import pytest
import torch
from elastic_lessons import DEALT, Model, learn, result, sender

from paceline.train.elastic.state_transfer.catch_up import AdmissionTest, RemoteLog, SendersLostError
from paceline.train.elastic.state_transfer.transfer_protocol import OptimizerStep, ViewEntered
from paceline.train.module_tensors import memory_of

__all__ = ["sender"]


def test_a_learner_is_near_when_it_is_at_most_one_round_behind():
    pursuit = AdmissionTest()
    assert [pursuit.is_near(behind) for behind in (5, 3, 1)] == [False, False, True]


def test_a_learner_that_never_comes_near_is_admitted_in_time():
    pursuit = AdmissionTest()
    taken = next(n for n in range(1, 1000) if pursuit.is_near(10))
    assert taken == 4 * 10 + 16 + 1
    assert pursuit.is_hopeless


def test_results_are_replayed_until_the_donors_are_gone(sender):
    model = Model(1, 10)
    senders = [sender(model, "a"), sender(model, "b")]
    received = learn(*(each.offer for each in senders)).receive()
    assert received is not None
    near: list[int] = []
    replay = RemoteLog(received.senders, near.append, lambda: None)
    value = torch.arange(6.0).view(2, 3)
    for each in senders:
        each.snapshot.log(*result(7, value, torch.ones(1, dtype=torch.int64), state=3))
        each.snapshot.log(ViewEntered(8, 20, ("c",)))
    said, values = replay.take(7)
    assert (said.state, said.dealt) == (3, DEALT)
    assert torch.equal(values[0], value)
    assert values[1].dtype is torch.int64
    assert near == [7]
    senders[0].snapshot.close()
    assert replay.next(8) == ViewEntered(8, 20, ("c",))
    threading.Timer(0.2, senders[1].snapshot.log, result(8, value)).start()
    assert torch.equal(replay.take(8)[1][0], value)
    senders[1].snapshot.close()
    with pytest.raises(SendersLostError, match="no worker serves the result of round 9"):
        replay.take(9)


def test_a_learner_says_that_it_is_near_when_it_may_come(sender):
    made = sender(Model(1, 10), "a")
    received = learn(made.offer).receive()
    assert received is not None
    near: list[int] = []
    may_join: list[bool] = []
    replay = RemoteLog(received.senders, near.append, lambda: None, lambda: bool(may_join))
    for number in range(7, 9):
        made.snapshot.log(*result(number, torch.ones(1)))
    replay.take(7)
    assert near == []
    may_join.append(True)
    replay.take(8)
    assert near == [8]
    replay.close()


def test_a_learner_that_never_comes_near_need_not_be_ready(sender):
    made = sender(Model(1, 10), "a")
    received = learn(made.offer).receive()
    assert received is not None
    near: list[int] = []
    replay = RemoteLog(received.senders, near.append, lambda: None, lambda: False)
    for number in range(7, 32):
        made.snapshot.log(*result(number, torch.ones(1)))
        replay.take(number)
    assert near == [7 + 4 * 1 + 16]
    replay.close()


def test_a_learner_that_does_not_come_costs_no_more_than_a_log(sender):
    made = sender(Model(1, 10), "a")
    value = torch.ones(5 << 20)
    waits = []
    for number in range(7, 12):
        made.snapshot.log(*result(number, value))
        waits.append(made.snapshot.make_room())
    assert waits == [False, False, False, True, False], "the transfer ends when 64 MiB are waiting"
    assert made.snapshot.is_over


def test_a_donor_waits_for_a_learner_that_is_too_slow(sender):
    made = sender(Model(1, 10), "a")
    received = learn(made.offer).receive()
    assert received is not None
    replay = RemoteLog(received.senders, lambda _: None, lambda: None)
    value = torch.ones(9 << 20)
    for number in range(7, 9):
        made.snapshot.log(*result(number, value))
    slowly = threading.Thread(target=lambda: [replay.take(number) for number in range(7, 10)])
    slowly.start()
    assert made.snapshot.make_room(), "72 MiB are more than the log may hold"
    assert not made.snapshot.is_over
    made.snapshot.log(*result(9, torch.ones(1)))
    assert not made.snapshot.make_room()
    slowly.join(60.0)
    assert not slowly.is_alive()
    replay.close()


def test_steps_that_the_learner_has_make_room_in_their_round(sender):
    model = Model(1, 10)
    senders = [sender(model, "a"), sender(model, "b")]
    received = learn(*(each.offer for each in senders)).receive()
    assert received is not None
    replay = RemoteLog(received.senders, lambda _: None, lambda: None)
    gradient = torch.ones(9 << 20)
    kinds = ((str(gradient.dtype), tuple(gradient.shape)),)
    for made in senders:
        for _ in range(2):
            made.snapshot.log(OptimizerStep(7, 6, "optimizer", gradient.nbytes, kinds, (True,)), [memory_of(gradient)])
    asks = threading.Thread(target=lambda: [replay.follow(7) for _ in range(3)])
    asks.start()
    for made in senders:
        made.snapshot.make_room()  # 72 MiB is more than the log may hold
        assert not made.snapshot.is_over, "the receiver takes both steps, and has not got stuck"
        made.snapshot.log(*result(7))
    asks.join(60.0)
    assert not asks.is_alive()
    replay.close()
