"""A StatefulLoader whose ranks change between batches: each sample is used once, and all ranks agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import streams

from paceline import StatefulLoader
from paceline.train.data.epoch_order import EpochStep, RankSlot, RemainingSamples


class Dealt:
    """A sampler controlled by the test; `counts` is the loader's report about the latest batch."""

    def __init__(self) -> None:
        self.seat = RankSlot(1, 0)
        self.counts = False

    def begin_batch(self) -> RankSlot:
        return self.seat

    def batch_delivered(self, *, counts: bool) -> None:
        self.counts = counts

    def end_batch(self) -> None:
        """Records that the batch is complete."""


class Worker:
    """One rank's loader in the middle of an epoch."""

    def __init__(
        self, samples: int, remainder: str = "share", dataset: Callable[[int], object] = range, **options: object
    ) -> None:
        self.dealer = Dealt()
        self.loader = StatefulLoader(dataset(samples), 2, seed=5, remainder=remainder, **options)
        self.loader.use_batch_assigner(self.dealer)
        self.batches: Iterator[object] = iter(self.loader)

    def step(self, seat: RankSlot) -> list[int] | None:
        """Returns the samples of the next batch that are used, or None at the end of the epoch."""
        self.dealer.seat = seat
        batch = next(self.batches, None)
        return None if batch is None else batch.tolist() if self.dealer.counts else []


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
    assert len(set(used)) == len(used) > 37 - 3 * 8  # of the stream, and of what came again, less than a step is left


def test_a_rank_without_samples_repeats_one_that_counts_not() -> None:
    workers = [Worker(4) for _ in range(3)]
    first = [worker.step(RankSlot(3, rank)) for rank, worker in enumerate(workers)]
    assert sorted(index for batch in first for index in batch or ()) == [0, 1, 2, 3]
    many = [Worker(2) for _ in range(3)]
    assert many[2].step(RankSlot(3, 2)) == []
    assert len(many[0].step(RankSlot(3, 0)) or ()) == 1


@pytest.mark.parametrize("dataset", [range, streams.Plain])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_what_was_read_ahead_for_others_is_not_used(
    persistent_workers: bool, dataset: Callable[[int], Sequence[int]]
) -> None:
    worker = Worker(12, dataset=dataset, num_workers=1, persistent_workers=persistent_workers)
    used = worker.step(RankSlot(2, 0)) or []
    worker.loader.return_samples_of([1])
    while batch := worker.step(RankSlot(1, 0)):
        used += batch
    assert sorted(used) == list(range(12))


def test_a_rank_that_is_late_for_a_batch_counts_not() -> None:
    worker = Worker(8)
    assert worker.step(RankSlot(2, None)) == []
    assert worker.loader.state_dict()["position"] == 4


def test_repeated_samples_do_not_come_again() -> None:
    step = EpochStep(RemainingSamples(6, 8), ranks=3, count=2)
    assert step.places_of(2) == []
    worker = Worker(2, remainder="repeat")
    assert worker.step(RankSlot(3, 0)) is not None
    worker.loader.return_samples_of([2])
    assert "returned" not in worker.loader.state_dict()


@pytest.mark.parametrize("dataset", [range, streams.Skips])
def test_returned_samples_survive_in_a_checkpoint(dataset: Callable[[int], Sequence[int]]) -> None:
    worker = Worker(8, dataset=dataset)
    taken = worker.step(RankSlot(2, 0))
    worker.loader.return_samples_of([1])
    plain = StatefulLoader(dataset(8), 3, seed=5, num_replicas=1, rank=0)
    plain.load_state_dict(worker.loader.state_dict())
    rest = [index for batch in plain for index in batch.tolist()]
    assert sorted([*rest, *(taken or ())]) == list(range(8))
    assert plain.state_dict()["position"] == 0
    assert "returned" not in plain.state_dict()


def test_a_loader_for_certain_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas=2 and rank=0.*leave both out"):
        StatefulLoader(range(8), num_replicas=2, rank=0).use_batch_assigner(Dealt())


def test_a_stream_that_has_become_shorter_is_told() -> None:
    worker = Worker(8, dataset=streams.Plain)
    worker.step(RankSlot(2, 0))
    worker.step(RankSlot(2, 0))
    worker.loader.return_samples_of([1])
    worker.loader.dataset.length = 7
    with pytest.raises(ValueError, match="sample 7 of epoch 0 is to be read again, but Plain ended after 7"):
        worker.step(RankSlot(1, 0))
