"""Lessons in one process: chunks from several donors, a snapshot and its learner."""

from __future__ import annotations

import socket
from random import Random

from elastic_lessons import DEALT, Model, donor, learn
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.joining.chunks import Chunks, Layout
from paceline.elastic.joining.learner import Learner
from paceline.elastic.joining.wire import CHUNK_BYTES

__all__ = ["donor"]


@given(st.integers(0, 30), st.integers(1, 4), st.randoms())
def test_every_chunk_comes_whoever_is_lost(count, donors, random):
    chunks, alive = Chunks(count), [f"d{at}" for at in range(donors)]
    asked: dict[str, int] = {}
    while not chunks.is_complete:
        donor = random.choice(alive)
        if donor in asked and len(alive) > 1 and random.random() < 0.2:
            alive.remove(donor)
            del asked[donor]
            chunks.lost(donor)
        elif donor in asked:
            chunks.arrived(asked.pop(donor))
        else:
            chunk = chunks.next_for(donor)
            assert chunk is not None, "an idle donor helps the others"
            asked[donor] = chunk
    assert chunks.next_for(alive[0]) is None


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_chunks_cover_the_buffers_once_and_in_order(sizes, chunk_bytes):
    layout = Layout(sizes, chunk_bytes)
    spans = [span for chunk in range(layout.count) for span in layout.spans(chunk)]
    covered = [(buffer, at) for buffer, first, stop in spans for at in range(first, stop)]
    assert covered == [(buffer, at) for buffer, size in enumerate(sizes) for at in range(size)]
    assert all(
        sum(stop - first for _, first, stop in layout.spans(each)) <= chunk_bytes for each in range(layout.count)
    )


def test_a_snapshot_is_the_state_at_its_instant(donor):
    model, other = Model(1), Model(2)
    before = model.registry.digest()
    donors = [donor(model, "a"), donor(model, "b")]
    model.optimizer.step()
    assert model.registry.digest() != before
    taught = learn(*(each.offer for each in donors)).learn()
    assert taught is not None
    other.registry.restore(taught.take_state())
    assert other.registry.digest() == before
    assert (taught.contents.round, taught.contents.committed, taught.contents.dealt) == (7, 99, DEALT)
    assert len(taught.donors) == 2
    for each in taught.donors:
        each.close()


def test_a_damaged_chunk_is_taken_from_the_other_donor(donor, monkeypatch):
    model, other = Model(1), Model(2)
    wrong = donor(model, "wrong")
    right = donor(model, "right")
    taken: list[str] = []

    def damaged(self: Learner, name: str, connection: socket.socket, room: object) -> None:
        with monkeypatch.context() as patch:
            if name == "wrong":
                patch.setattr("paceline.elastic.joining.learner.digest_of_chunk", lambda parts: b"")
            taken.append(name)
            whole(self, name, connection, room)

    whole = Learner._get_chunks
    monkeypatch.setattr(Learner, "_get_chunks", damaged)
    assert learn(wrong.offer).learn() is None
    taught = learn(right.offer).learn()
    assert taught is not None
    assert taken == ["wrong", "right"]
    other.registry.restore(taught.take_state())
    assert other.registry.digest() == model.registry.digest()
    for each in taught.donors:
        each.close()


def test_donors_that_are_gone_teach_nothing(donor):
    gone = donor(Model(1), "gone")
    gone.snapshot.close()
    assert gone.snapshot.is_over
    assert learn(gone.offer).learn() is None


def test_a_lesson_of_another_round_is_not_mixed_in(donor):
    model = Model(1)
    first = donor(model, "first")
    model.optimizer.step()
    later = donor(model, "later", round_=8)
    taught = learn(first.offer, later.offer).learn()
    assert taught is not None
    assert len(taught.donors) == 1
    for each in taught.donors:
        each.close()


def test_random_bytes_do_not_end_a_lesson(donor):
    made = donor(Model(1, 10), "a")
    host, port = made.offer.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(Random(1).randbytes(200))
        taught = learn(made.offer).learn()
    assert taught is not None
    taught.donors[0].close()


def test_a_chunk_is_as_large_as_is_said():
    assert Model(1).module.weight.nbytes > CHUNK_BYTES
