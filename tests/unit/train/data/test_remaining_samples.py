"""A StatefulLoader whose ranks change between batches: each sample is used once, and all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import streams
from remaining_samples import Dealt, Worker

from paceline import StatefulLoader
from paceline.train.data.epoch_order import RankSlot


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
