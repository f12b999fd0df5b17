"""State transfers in one process: chunks from several senders, a snapshot and its receiver."""

from __future__ import annotations

import socket
from random import Random

from elastic_lessons import DEALT, Model, learn, sender

from paceline.train.elastic.state_transfer.receiver import StateReceiver

__all__ = ["sender"]


def test_a_snapshot_is_the_state_at_its_instant(sender):
    model, other = Model(1), Model(2)
    before = model.registry.digest()
    senders = [sender(model, "a"), sender(model, "b")]
    model.optimizer.step()
    assert model.registry.digest() != before
    received = learn(*(each.offer for each in senders)).receive()
    assert received is not None
    other.registry.restore(received.take_state())
    assert other.registry.digest() == before
    assert (received.contents.round, received.contents.committed, received.contents.dealt) == (7, 99, DEALT)
    assert len(received.senders) == 2
    for each in received.senders:
        each.close()


def test_a_damaged_chunk_is_taken_from_the_other_donor(sender, monkeypatch):
    model, other = Model(1), Model(2)
    wrong = sender(model, "wrong")
    right = sender(model, "right")
    taken: list[str] = []

    def damaged(self: StateReceiver, name: str, connection: socket.socket, room: object) -> None:
        with monkeypatch.context() as patch:
            if name == "wrong":
                patch.setattr("paceline.train.elastic.state_transfer.receiver.digest_of_chunk", lambda parts: b"")
            taken.append(name)
            whole(self, name, connection, room)

    whole = StateReceiver._get_chunks
    monkeypatch.setattr(StateReceiver, "_get_chunks", damaged)
    assert learn(wrong.offer).receive() is None
    received = learn(right.offer).receive()
    assert received is not None
    assert taken == ["wrong", "right"]
    other.registry.restore(received.take_state())
    assert other.registry.digest() == model.registry.digest()
    for each in received.senders:
        each.close()


def test_donors_that_are_gone_teach_nothing(sender):
    gone = sender(Model(1), "gone")
    gone.snapshot.close()
    assert gone.snapshot.is_over
    assert learn(gone.offer).receive() is None


def test_a_lesson_of_another_round_is_not_mixed_in(sender):
    model = Model(1)
    first = sender(model, "first")
    model.optimizer.step()
    later = sender(model, "later", round_=8)
    received = learn(first.offer, later.offer).receive()
    assert received is not None
    assert len(received.senders) == 1
    for each in received.senders:
        each.close()


def test_random_bytes_do_not_end_a_lesson(sender):
    made = sender(Model(1, 10), "a")
    host, port = made.offer.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(Random(1).randbytes(200))
        received = learn(made.offer).receive()
    assert received is not None
    received.senders[0].close()
