"""The loader of logical shards."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

from paceline.train.logical_shards.shard_batches import EpochPlan
from paceline.train.logical_shards.shard_loader import ShardLoader


def test_a_loader_lists_what_it_reads_when_it_reads(monkeypatch):
    """A loader restarts whenever its shards change, and the ranks of an elastic job wait for the first batch."""
    listed = []
    samples_of = EpochPlan.samples_of
    monkeypatch.setattr(EpochPlan, "samples_of", lambda *where: listed.append(where) or samples_of(*where))
    shards = SimpleNamespace(count=4, mine=range(2), seed=0, begin_batch=lambda: None)
    loader = ShardLoader(range(80_000), 2, shards)
    assert len(next(iter(loader))) == 2
    assert len(listed) == 2


def test_a_loader_that_is_dropped_is_in_no_cycle():
    """Its processes then stop immediately; those stopped by the garbage collector take five seconds each."""
    shards = SimpleNamespace(count=4, mine=range(4), seed=0, begin_batch=lambda: None)
    loader = ShardLoader(range(40), 2, shards, shuffle=False)
    steps = iter(loader)
    assert [batch.data.tolist() for batch in next(steps)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader, steps
        assert gone() is None
    finally:
        gc.enable()
