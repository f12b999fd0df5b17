"""The samples of an epoch that remain after workers have died."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import streams
from remaining_samples import Worker

from paceline.train.data.epoch_order import EpochStep, RankSlot, RemainingSamples


def newcomer(like: Worker, *arguments: object, **options: object) -> Worker:
    worker = Worker(*arguments, **options)
    worker.loader.load_state_dict(like.loader.state_dict())
    worker.batches = iter(worker.loader)
    return worker


def samples_of_an_epoch(seed: int, samples: int, **options: object) -> list[int]:
    """Returns the samples used in an epoch in which ranks die and join at random."""
    drawn = random.Random(seed)
    workers = [Worker(samples, **options) for _ in range(drawn.randrange(1, 5))]
    used: list[int] = []
    while True:
        count = len(workers)
        batches = [worker.step(RankSlot(count, rank)) for rank, worker in enumerate(workers)]
        if None in batches:
            assert batches == [None] * count
            break
        dead = {rank for rank in range(1, count) if drawn.random() < 0.2}
        used += [index for rank, batch in enumerate(batches) if rank not in dead for index in batch or ()]
        workers = [worker for rank, worker in enumerate(workers) if rank not in dead]
        for worker in workers:
            worker.loader.return_samples_of(sorted(dead))
        assert len({str(worker.loader.state_dict()) for worker in workers}) == 1
        if drawn.random() < 0.3:
            workers.append(newcomer(workers[0], samples, **options))
    assert {worker.loader.epoch for worker in workers} == {1}
    return used


@pytest.mark.parametrize("seed", range(30))
def test_each_sample_counts_once_whoever_dies(seed: int) -> None:
    samples = random.Random(seed).randrange(1, 40)
    assert sorted(samples_of_an_epoch(seed, samples)) == list(range(samples))


STREAMS = (
    streams.Plain,
    streams.Skips,
    streams.Advances,
    streams.RemembersOnItself,
    streams.RemembersInItsIterator,
    streams.SkipsInTheOrderOfTheEpoch,
)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("remainder", ["share", "repeat"])
def test_each_sample_of_a_stream_counts_once(kind: Callable[[int], object], remainder: str) -> None:
    keeps_state = kind in (streams.RemembersOnItself, streams.RemembersInItsIterator)
    for seed in range(20):
        samples = random.Random(seed).randrange(1, 40)
        used = samples_of_an_epoch(seed, samples, dataset=kind, remainder=remainder, dataset_state=keeps_state)
        assert sorted(set(used)) == list(range(samples))
        assert remainder == "repeat" or len(used) == samples


@pytest.mark.parametrize("seed", range(10))
def test_whole_batches_of_a_stream_count_at_most_once(seed: int) -> None:
    used = samples_of_an_epoch(seed, 37, dataset=streams.Skips, remainder="drop")
    assert len(set(used)) == len(used) > 37 - 3 * 8  # drops fewer samples than a step uses, counting repeats


def test_a_rank_without_samples_repeats_one_that_counts_not() -> None:
    workers = [Worker(4) for _ in range(3)]
    first = [worker.step(RankSlot(3, rank)) for rank, worker in enumerate(workers)]
    assert sorted(index for batch in first for index in batch or ()) == [0, 1, 2, 3]
    many = [Worker(2) for _ in range(3)]
    assert many[2].step(RankSlot(3, 2)) == []
    assert len(many[0].step(RankSlot(3, 0)) or ()) == 1


def test_repeated_samples_do_not_come_again() -> None:
    step = EpochStep(RemainingSamples(6, 8), ranks=3, count=2)
    assert step.places_of(2) == []
    worker = Worker(2, remainder="repeat")
    assert worker.step(RankSlot(3, 0)) is not None
    worker.loader.return_samples_of([2])
    assert "returned" not in worker.loader.state_dict()
