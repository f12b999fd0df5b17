from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline import StatefulLoader

Stops = list[tuple[int, int, int]]


def numbers(batches: object) -> list[int]:
    return [int(each) for batch in batches for each in batch]


def in_turn(length: int, stops: Stops, **options: object) -> list[int]:
    """Returns the samples of an epoch in several turns; a stop is the number of ranks, the batch size and the steps."""
    used: list[int] = []
    state: dict[str, int | bool] | None = None
    for ranks, batch_size, steps in stops:
        loaders = [
            StatefulLoader(range(length), batch_size, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            used += numbers(itertools.islice(loader, steps))
        state = loaders[0].state_dict()
        if state["epoch"] == 1:
            return used
    rest = StatefulLoader(range(length), 3, num_replicas=1, rank=0, **options)
    rest.load_state_dict(state)
    return used + numbers(rest)


some_stops = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=5)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 150), some_stops, st.booleans(), st.integers(0, 1000))
def test_each_sample_is_used_exactly_once_whoever_goes_on(length, stops, shuffle, seed):
    assert sorted(in_turn(length, stops, shuffle=shuffle, seed=seed)) == list(range(length))


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(0, 60), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)), max_size=2))
def test_what_workers_have_read_ahead_is_not_lost(length, stops):
    stops = stops or [(1, 2, 1)]
    options = {"num_workers": 2, "prefetch_factor": 4, "multiprocessing_context": "fork"}
    assert sorted(in_turn(length, stops, **options)) == list(range(length))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 8), st.sampled_from(["share", "repeat", "drop"]))
def test_the_remainder_is_shared_repeated_or_dropped(length, ranks, batch_size, remainder):
    loaders = [
        StatefulLoader(range(length), batch_size, num_replicas=ranks, rank=rank, remainder=remainder)
        for rank in range(ranks)
    ]
    promised = [len(loader) for loader in loaders]
    batches = [list(loader) for loader in loaders]
    assert [len(each) for each in batches] == promised
    used = [number for each in batches for number in numbers(each)]
    if remainder == "share":
        assert sorted(used) == list(range(length))
        assert max(promised) - min(promised) <= 1
        assert promised[0] == max(promised)
    else:
        assert len(set(promised)) == 1
        whole = length - length % (ranks * batch_size) if remainder == "drop" else length
        assert len(set(used)) == whole
        assert len(used) - whole < ranks


def test_the_order_is_that_of_the_distributed_sampler():
    from paceline import DistributedSampler

    loader = StatefulLoader(range(30), 4, seed=3, num_replicas=1, rank=0)
    loader.set_epoch(2)
    sampler = DistributedSampler(range(30), num_replicas=1, rank=0, seed=3)
    sampler.set_epoch(2)
    assert numbers(loader) == list(sampler)


def test_an_epoch_that_was_left_goes_on():
    loader = StatefulLoader(range(20), 4, num_replicas=1, rank=0)
    first = numbers(itertools.islice(loader, 2)) + numbers(loader)
    second = numbers(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert loader.epoch == 2


def test_a_state_after_the_last_batch_ends_the_epoch():
    loader = StatefulLoader(range(8), 4, num_replicas=1, rank=0)
    states = [loader.state_dict() for _ in loader]
    again = StatefulLoader(range(8), 4, num_replicas=1, rank=0)
    again.load_state_dict(states[-1])
    assert (again.epoch, list(again), again.epoch) == (0, [], 1)


def test_set_epoch_with_the_loaded_epoch_keeps_the_place():
    loader = StatefulLoader(range(8), 2, num_replicas=1, rank=0)
    loader.set_epoch(5)
    next(iter(loader))
    again = StatefulLoader(range(8), 2, num_replicas=1, rank=0)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(5)
    assert len(again) == 3
    again.set_epoch(6)
    assert len(again) == 4


def test_a_state_can_be_loaded_while_iterating():
    loader = StatefulLoader(range(8), 2, shuffle=False, num_replicas=1, rank=0)
    batches = iter(loader)
    first = next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    assert list(batches) == []
    assert numbers([first, *loader]) == list(range(8))


def test_batches_are_collated_as_a_data_loader_does():
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(6, 1), torch.arange(6))
    x, y = next(iter(StatefulLoader(dataset, 3, shuffle=False, num_replicas=2, rank=1)))
    assert x.shape == (3, 1)
    assert y.tolist() == [3, 4, 5]


def test_a_state_of_another_dataset_or_order_is_refused():
    state = StatefulLoader(range(8), num_replicas=1, rank=0).state_dict()
    with pytest.raises(ValueError, match="of 8 samples with shuffle=True, this loader has 9 with shuffle=True; load"):
        StatefulLoader(range(9), num_replicas=1, rank=0).load_state_dict(state)
    with pytest.raises(ValueError, match="has 8 with shuffle=False"):
        StatefulLoader(range(8), shuffle=False, num_replicas=1, rank=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"remainder": "pad"}, "remainder is 'pad'; it must be one of share, repeat, drop"),
        ({"num_replicas": 2, "rank": 2}, "rank is 2; with num_replicas 2"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_right(options, message):
    with pytest.raises(ValueError, match=message):
        StatefulLoader(range(8), **options)


def test_what_is_neither_indexed_nor_a_stream_is_refused():
    with pytest.raises(TypeError, match="got a set; it needs an IterableDataset, or a dataset with __len__ and"):
        StatefulLoader({1, 2})
