"""Lessons in one process: chunks from several donors, the log of results, a snapshot and its learner."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.elastic.dealings import Dealt
from paceline.elastic.joining.chunks import Chunks, Layout
from paceline.elastic.joining.donors import KEY
from paceline.elastic.joining.learner import Learner
from paceline.elastic.joining.log import LogReader, append, new_log
from paceline.elastic.joining.replay import LostDonorsError, Pursuit, Replay
from paceline.elastic.joining.snapshot import Snapshot
from paceline.elastic.joining.wire import CHUNK_BYTES, Entered, Result, Stepped
from paceline.elastic.messages import Learn
from paceline.elastic.registry import Registry
from paceline.parallel.digests import digest_of, memory_of
from paceline.security.secret import derive_key, job_secret
from paceline.store.tcp import listen

DEALT = Dealt(7, ("a", "b"))


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


def test_a_learner_is_near_when_it_is_at_most_one_round_behind():
    pursuit = Pursuit()
    assert [pursuit.is_near(behind) for behind in (5, 3, 1)] == [False, False, True]


def test_a_learner_that_never_comes_near_is_admitted_in_time():
    pursuit = Pursuit()
    taken = next(n for n in range(1, 1000) if pursuit.is_near(10))
    assert taken == 4 * 10 + 16 + 1
    assert pursuit.is_hopeless


def result(round_: int, *tensors: torch.Tensor, state: int = 0) -> tuple[Result, list[memoryview]]:
    memories = [memoryview(bytes(memory_of(each))) for each in tensors]
    kinds = tuple((str(each.dtype), tuple(each.shape)) for each in tensors)
    return Result(round_, sum(map(len, memories)), kinds, digest_of(tensors), state, DEALT), memories


@pytest.fixture
def log() -> Iterator[int]:
    descriptor = new_log()
    yield descriptor
    os.close(descriptor)


def test_the_log_gives_what_happened_in_order(log):
    append(log, *result(7, torch.arange(3.0)))
    append(log, Entered(8, 20, ("a",)))
    append(log, *result(8, torch.arange(4.0)))
    reader = LogReader(log)
    found = [reader.next(7, 0), reader.next(8, 0), reader.next(8, 20), reader.next(9, 20)]
    assert [entry.item.round if entry else None for entry in found] == [7, 8, 8, None]
    assert isinstance(found[1].item, Entered)
    assert isinstance(found[2].item, Result)
    assert os.pread(log, 16, found[2].body) == bytes(memory_of(torch.arange(4.0)))
    assert reader.ahead == 2


def test_results_that_the_learner_has_take_no_memory(log):
    for number in range(3):
        append(log, *result(number, torch.ones(1 << 20)))
    reader = LogReader(log)
    assert reader.next(0, 0) is not None
    before = os.fstat(log).st_blocks
    assert reader.forget(2) > 8 << 20
    assert os.fstat(log).st_blocks < 0.5 * before
    assert reader.next(1, 0) is None
    assert reader.next(2, 0) is not None


class Model:
    """A network, an optimizer with a state, and what is needed to serve them."""

    def __init__(self, seed: int, size: int = 1200) -> None:
        torch.manual_seed(seed)
        self.module = nn.Linear(size, size)  # more than one chunk
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.module(torch.ones(1, size)).sum().backward()
        self.optimizer.step()
        self.registry = Registry(self.module, {"optimizer": self.optimizer})


class Donor:
    """A snapshot of a model, and where it is served."""

    def __init__(self, model: Model, name: str, number: int = 5, round_: int = 7) -> None:
        listener = listen("127.0.0.1", 0, job_secret())
        self.offer = Learn(number, name, round_, f"127.0.0.1:{listener.getsockname()[1]}")
        key = derive_key(job_secret(), KEY)
        self.snapshot = Snapshot(number, model.registry, round_, 99, DEALT, listener, key)


@pytest.fixture
def donor() -> Iterator[Callable[..., Donor]]:
    with ExitStack() as closing:

        def make(*arguments: object, **rest: object) -> Donor:
            made = Donor(*arguments, **rest)
            closing.callback(made.snapshot.close)
            return made

        yield make


def learn(*offers: Learn) -> Learner:
    return Learner(lambda: offers, lambda: False)


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


def test_results_are_replayed_until_the_donors_are_gone(donor):
    model = Model(1, 10)
    donors = [donor(model, "a"), donor(model, "b")]
    taught = learn(*(each.offer for each in donors)).learn()
    assert taught is not None
    near: list[int] = []
    replay = Replay(taught.donors, near.append, lambda: None)
    value = torch.arange(6.0).view(2, 3)
    for each in donors:
        each.snapshot.log(*result(7, value, torch.ones(1, dtype=torch.int64), state=3))
        each.snapshot.log(Entered(8, 20, ("c",)))
    said, values = replay.take(7)
    assert (said.state, said.dealt) == (3, DEALT)
    assert torch.equal(values[0], value)
    assert values[1].dtype is torch.int64
    assert near == [7]
    donors[0].snapshot.close()
    assert replay.next(8) == Entered(8, 20, ("c",))
    threading.Timer(0.2, donors[1].snapshot.log, result(8, value)).start()
    assert torch.equal(replay.take(8)[1][0], value)
    donors[1].snapshot.close()
    with pytest.raises(LostDonorsError, match="nobody serves the result of round 9"):
        replay.take(9)


def test_a_learner_says_that_it_is_near_when_it_may_come(donor):
    made = donor(Model(1, 10), "a")
    taught = learn(made.offer).learn()
    assert taught is not None
    near: list[int] = []
    may_come: list[bool] = []
    replay = Replay(taught.donors, near.append, lambda: None, lambda: bool(may_come))
    for number in range(7, 9):
        made.snapshot.log(*result(number, torch.ones(1)))
    replay.take(7)
    assert near == []
    may_come.append(True)
    replay.take(8)
    assert near == [8]
    replay.close()


def test_a_learner_that_never_comes_near_need_not_be_ready(donor):
    made = donor(Model(1, 10), "a")
    taught = learn(made.offer).learn()
    assert taught is not None
    near: list[int] = []
    replay = Replay(taught.donors, near.append, lambda: None, lambda: False)
    for number in range(7, 32):
        made.snapshot.log(*result(number, torch.ones(1)))
        replay.take(number)
    assert near == [7 + 4 * 1 + 16]
    replay.close()


def test_a_learner_that_does_not_come_costs_no_more_than_a_log(donor):
    made = donor(Model(1, 10), "a")
    value = torch.ones(5 << 20)
    waits = []
    for number in range(7, 12):
        made.snapshot.log(*result(number, value))
        waits.append(made.snapshot.make_room())
    assert waits == [False, False, False, True, False], "the lesson ends when 64 MiB are waiting"
    assert made.snapshot.is_over


def test_a_donor_waits_for_a_learner_that_is_too_slow(donor):
    made = donor(Model(1, 10), "a")
    taught = learn(made.offer).learn()
    assert taught is not None
    replay = Replay(taught.donors, lambda _: None, lambda: None)
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


def test_steps_that_the_learner_has_make_room_in_their_round(donor):
    model = Model(1, 10)
    donors = [donor(model, "a"), donor(model, "b")]
    taught = learn(*(each.offer for each in donors)).learn()
    assert taught is not None
    replay = Replay(taught.donors, lambda _: None, lambda: None)
    gradient = torch.ones(9 << 20)
    kinds = ((str(gradient.dtype), tuple(gradient.shape)),)
    for made in donors:
        for _ in range(2):
            made.snapshot.log(Stepped(7, 6, "optimizer", gradient.nbytes, kinds, (True,)), [memory_of(gradient)])
    asks = threading.Thread(target=lambda: [replay.follow(7) for _ in range(3)])
    asks.start()
    for made in donors:
        made.snapshot.make_room()  # 72 MiB are more than the log may hold
        assert not made.snapshot.is_over, "the learner takes both steps, and has not got stuck"
        made.snapshot.log(*result(7))
    asks.join(60.0)
    assert not asks.is_alive()
    replay.close()


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
