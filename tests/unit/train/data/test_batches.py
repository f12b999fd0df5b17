"""StatefulLoader with streams."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from streams import (
    Advances,
    KeepsItsDictionary,
    NumberIterator,
    Plain,
    RemembersInItsIterator,
    RemembersOnItself,
    ShuffledByEpoch,
    Skips,
    SkipsInTheOrderOfTheEpoch,
    SplitsItself,
)

from paceline import StatefulLoader

REMAINDERS = ("share", "repeat", "drop")
KINDS = (
    (Plain, False),
    (SplitsItself, False),
    (Skips, False),
    (Advances, False),
    (RemembersOnItself, False),
    (RemembersOnItself, True),
    (KeepsItsDictionary, True),
    (RemembersInItsIterator, True),
    (ShuffledByEpoch, False),
    (SkipsInTheOrderOfTheEpoch, False),
)
IN_ORDER = KINDS[:-2]
IN_WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
Stops = list[tuple[int, int, int]]
Batches = list[list[int]]


def loaders_of(dataset, ranks: int, batch_size: int, **options: object) -> list[StatefulLoader]:
    return [
        StatefulLoader(dataset, batch_size, shuffle=False, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]


def in_turn(make, stops: Stops, **options: object) -> list[list[Batches]]:
    """Returns each rank's batches, by turn. In each turn, new loaders continue from the state of the previous turn.

    A stop describes one turn: the number of ranks, the batch size, and the number of steps. The ranks of the last turn
    continue to the end of the epoch. All ranks have the same state after a turn in which they have read the same number
    of batches.
    """
    turns: list[list[Batches]] = []
    state = None
    for ranks, batch_size, steps in [*stops, (stops[-1][0] % 3 + 1, 3, 1000)]:
        loaders = loaders_of(make(), ranks, batch_size, **options)
        turn: list[Batches] = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            turn.append([batch.tolist() for batch in itertools.islice(loader, steps)])
        turns.append(turn)
        states = [loader.state_dict() for loader in loaders]
        if len({len(batches) for batches in turn}) == 1:
            assert states == states[:1] * ranks
        state = states[0]
        if state["epoch"]:
            break
    return turns


def numbers(turns: object) -> list[int]:
    return [turns] if isinstance(turns, int) else [number for each in turns for number in numbers(each)]


some_stops = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 120), some_stops, st.sampled_from(REMAINDERS), st.sampled_from(IN_ORDER))
def test_a_stream_is_dealt_out_as_an_indexed_dataset(length, stops, remainder, kind):
    stream, dataset_state = kind
    indexed = in_turn(lambda: range(length), stops, remainder=remainder)
    streamed = in_turn(lambda: stream(length), stops, remainder=remainder, dataset_state=dataset_state)
    assert streamed == indexed


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 120), some_stops, st.sampled_from(KINDS))
def test_each_sample_is_used_once_in_the_order_of_the_stream(length, stops, kind):
    stream, dataset_state = kind
    turns = in_turn(lambda: stream(length), stops, dataset_state=dataset_state)
    steps = [step for turn in turns for step in itertools.zip_longest(*turn, fillvalue=[])]
    assert numbers(steps) == list(stream(length))


@settings(max_examples=examples(5), deadline=None)
@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=2),
    st.sampled_from(REMAINDERS),
    st.sampled_from(KINDS),
    st.integers(1, 2),
)
def test_workers_change_neither_batches_nor_their_order(length, stops, remainder, kind, num_workers):
    stream, dataset_state = kind
    options = {"remainder": remainder, "dataset_state": dataset_state}
    workers = {**IN_WORKERS, "num_workers": num_workers, "prefetch_factor": 4}
    alone = in_turn(lambda: stream(length), stops, **options)
    assert in_turn(lambda: stream(length), stops, **options, **workers) == alone


def test_workers_that_are_sent_the_stream_give_the_same_batches():
    # Spawned workers also receive the stream as a message, but workers from a fork server need not import torch.
    [loader] = loaders_of(SplitsItself(7), 1, 2, num_workers=2, multiprocessing_context="forkserver")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 60), st.integers(1, 9))
def test_one_rank_gets_the_batches_of_a_data_loader(length, batch_size):
    [loader] = loaders_of(Plain(length), 1, batch_size)
    expected = torch.utils.data.DataLoader(Plain(length), batch_size)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]


@pytest.mark.parametrize(("stream", "dataset_state"), KINDS)
@pytest.mark.parametrize("workers", [{}, IN_WORKERS, {**IN_WORKERS, "persistent_workers": True}])
def test_a_left_epoch_goes_on_and_the_next_is_whole(stream, dataset_state, workers):
    [loader] = loaders_of(stream(11), 1, 2, dataset_state=dataset_state, **workers)
    for epoch in range(2):
        assert loader.epoch == epoch
        expected = stream(11)
        if isinstance(expected, ShuffledByEpoch):
            expected.set_epoch(epoch)
        used = [batch.tolist() for _ in range(3) for batch in itertools.islice(loader, 2)]
        used += [batch.tolist() for batch in loader]
        assert numbers(used) == list(expected)


@pytest.mark.parametrize("dataset", [Plain(12), range(12)])
def test_an_earlier_iterator_takes_nothing_from_a_later(dataset):
    [loader] = loaders_of(dataset, 1, 2, **IN_WORKERS, persistent_workers=True)
    earlier = iter(loader)
    used = [next(earlier).tolist()]
    later = iter(loader)
    used.append(next(later).tolist())
    assert list(earlier) == []
    used += [batch.tolist() for batch in later]
    assert numbers(used) == list(range(12))


@pytest.mark.parametrize("dataset", [Plain(12), range(12)])
def test_a_loader_that_is_dropped_is_in_no_cycle(dataset):
    """Its workers then stop immediately; workers stopped by the garbage collector take five seconds each."""
    others = set(multiprocessing.active_children())
    [loader] = loaders_of(dataset, 1, 2, **IN_WORKERS, persistent_workers=True)
    next(iter(loader))
    workers = set(multiprocessing.active_children()) - others
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
        assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_an_epoch_goes_on_without_a_second_reading():
    readings = []

    class Counted(Plain):
        def __iter__(self):
            readings.append(self)
            return super().__iter__()

    [loader] = loaders_of(Counted(12), 1, 2)
    for steps in (2, 1, 9):
        list(itertools.islice(loader, steps))
    assert loader.epoch == 1
    assert len(readings) == 1


def test_set_epoch_chooses_the_order_of_the_stream():
    [loader] = loaders_of(ShuffledByEpoch(20), 1, 4)
    next(iter(loader))
    loader.set_epoch(3)
    expected = ShuffledByEpoch(20)
    expected.set_epoch(3)
    assert numbers([batch.tolist() for batch in loader]) == list(expected)


def test_a_loaded_state_chooses_the_order_of_its_epoch():
    [loader] = loaders_of(ShuffledByEpoch(20), 1, 4)
    next(iter(loader))
    later = ShuffledByEpoch(20)
    later.set_epoch(3)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 8})
    assert numbers([batch.tolist() for batch in loader]) == list(later)[8:]


@pytest.mark.parametrize("rank", range(4))
def test_samples_that_can_be_passed_over_are_not_made(rank):
    stream = Advances(40)
    loader = StatefulLoader(stream, 5, num_replicas=4, rank=rank)
    used = numbers([batch.tolist() for batch in loader])
    assert len(used) == 10
    assert stream.made == used


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("rank", range(8))
def test_a_rank_keeps_few_samples_of_the_others(rank, remainder):
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    class Thing:
        pass

    class Things(Plain):
        def __iter__(self):
            nonlocal most
            for _ in range(self.length):
                thing = Thing()
                alive.add(thing)
                most = max(most, len(alive))
                yield thing
                del thing

    loader = StatefulLoader(
        Things(200), 8, num_replicas=8, rank=rank, remainder=remainder, collate_fn=lambda things: len(things)
    )
    assert sum(loader) == (24 if remainder == "drop" else 25)
    assert most <= 8 * 8 / 4 + 8 + 2


def test_a_state_of_the_stream_is_used_only_if_asked_for():
    begun = []

    class Watched(RemembersOnItself):
        def __iter__(self):
            begun.append(self.place)
            return super().__iter__()

    [first] = loaders_of(Watched(30), 1, 3, dataset_state=True)
    for _ in itertools.islice(first, 5):
        pass
    state = first.state_dict()
    assert (state["position"], state["stream"]) == (15, {"position": 12, "state": {"place": 12}})
    for dataset_state, place in ((True, 12), (False, 0)):
        [again] = loaders_of(Watched(30), 1, 3, dataset_state=dataset_state)
        again.load_state_dict(state)
        assert next(iter(again)).tolist() == [15, 16, 17]
        assert begun[-1] == place


def test_an_error_in_a_stream_is_not_its_end():
    failed = []

    class Flaky(Plain):
        def __iter__(self):
            for number in range(self.length):
                if number == 5 and not failed:
                    failed.append(number)
                    raise OSError("the line is down")
                yield number

    [loader] = loaders_of(Flaky(9), 1, 2)
    used = []
    with pytest.raises(OSError, match="the line is down"):
        for batch in loader:
            used.append(batch.tolist())
    assert used == [[0, 1], [2, 3]]
    assert loader.epoch == 0
    used += [batch.tolist() for batch in loader]
    assert numbers(used) == list(range(9))


def test_a_stream_with_a_length_gives_the_loader_one():
    class Sized(Plain):
        def __len__(self):
            return self.length

    for length, ranks, remainder in itertools.product((0, 1, 7, 8, 9, 23), (1, 3), REMAINDERS):
        for loader in loaders_of(Sized(length), ranks, 2, remainder=remainder):
            promised = len(loader)
            batches = iter(loader)
            if promised:
                next(batches)
                assert len(loader) == promised - 1
            assert len(list(batches)) == max(promised - 1, 0)


def test_a_stream_without_a_length_gives_the_loader_none():
    [loader] = loaders_of(Plain(8), 1, 2)
    with pytest.raises(TypeError, match=r"object of type 'Plain' has no len"):
        len(loader)


def test_a_chain_of_streams_is_a_stream():
    [loader] = loaders_of(Plain(4) + Plain(5), 1, 3)
    used = [next(iter(loader)).tolist()]
    [again] = loaders_of(Plain(4) + Plain(5), 1, 3)
    again.load_state_dict(loader.state_dict())
    used += [batch.tolist() for batch in again]
    assert used == [[0, 1, 2], [3, 0, 1], [2, 3, 4]]


def test_a_state_beyond_the_end_of_the_stream_is_refused():
    [loader] = loaders_of(Plain(8), 1, 2)
    list(itertools.islice(loader, 3))
    [shorter] = loaders_of(Plain(5), 1, 2)
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="at sample 6 of epoch 0, but Plain ended after 5; a stream must"):
        next(iter(shorter))


def test_a_state_of_an_indexed_dataset_is_refused():
    [indexed] = loaders_of(range(8), 1, 2)
    [loader] = loaders_of(Plain(8), 1, 2)
    with pytest.raises(ValueError, match="state is of 8 samples .* this loader has an unknown number of with"):
        loader.load_state_dict(indexed.state_dict())


class SkipsInPlace(Plain):
    def skip(self, count):
        return None


class AdvancesInSilence(Plain):
    def __iter__(self):
        return SilentIterator(self.length, [])


class SilentIterator(NumberIterator):
    def advance(self, count):
        return None


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        (SkipsInPlace, {}, r"SkipsInPlace.skip\(2\) returned None; it must return a dataset without the first 2"),
        (AdvancesInSilence, {}, r"SilentIterator.advance\(.*\) returned None; it must return the number of samples"),
        (Plain, {"dataset_state": True}, "neither Plain nor its iterator has state_dict and load_state_dict, which"),
    ],
)
def test_a_method_that_does_something_else_is_refused(stream, options, message):
    [before] = loaders_of(Plain(8), 1, 2)
    next(iter(before))
    [loader] = loaders_of(stream(8), 1, 2, **options)
    loader.load_state_dict(before.state_dict())
    with pytest.raises(TypeError, match=message):
        next(iter(loader))


def test_an_argument_that_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="shuffle=True with a Plain, which is a stream .* shuffle in the dataset"):
        StatefulLoader(Plain(8), shuffle=True)
    with pytest.raises(ValueError, match="dataset_state=True with a range, which is not a stream; leave it out"):
        StatefulLoader(range(8), dataset_state=True)
