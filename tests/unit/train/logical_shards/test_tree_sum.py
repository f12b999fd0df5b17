"""The order of summation over shards, and the state that belongs to a shard."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.logical_shards.shard_batches import EpochPlan, random_stream
from paceline.train.logical_shards.shard_loader import ShardLoader
from paceline.train.logical_shards.tree_sum import (
    Node,
    add_up,
    is_tree_over_ranks,
    nodes_within,
    pack,
    run_of_rank,
    unpack,
)


def written(shards: int, known: dict[Node, str] | None = None, node: Node | None = None) -> str:
    return add_up(node or Node(0, shards), lambda a, b: f"({a} {b})", str, known or {})


@pytest.mark.parametrize(
    ("shards", "order"),
    [
        (1, "0"),
        (3, "((0 1) 2)"),
        (6, "(((0 1) (2 3)) (4 5))"),
        (7, "(((0 1) (2 3)) ((4 5) 6))"),
        (8, "(((0 1) (2 3)) ((4 5) (6 7)))"),
    ],
)
def test_the_order_is_the_pairwise_tree_of_the_core(shards, order):
    assert written(shards) == order


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_order_is_the_same_for_every_number_of_ranks(shards, ranks):
    ranks = min(ranks, shards)
    known = {}
    for rank in range(ranks):
        for node in nodes_within(run_of_rank(shards, ranks, rank), Node(0, shards)):
            known[node] = written(shards, node=node)
    assert written(shards, known) == written(shards)


@given(st.integers(0, 6), st.integers(0, 6))
def test_powers_of_two_send_one_value_a_rank(shards, ranks):
    shards, ranks = 2 ** max(shards, ranks), 2**ranks
    for rank in range(ranks):
        assert len(nodes_within(run_of_rank(shards, ranks, rank), Node(0, shards))) == 1


@given(st.lists(st.booleans(), max_size=30))
def test_the_core_adds_only_where_its_tree_is_the_shards(cuts):
    """The core's tree is over ranks; `cuts` says between which shards a rank ends."""
    shards = len(cuts) + 1
    bounds = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), shards]
    nodes = [nodes_within(range(a, b), Node(0, shards)) for a, b in itertools.pairwise(bounds)]
    of_rank = [" ".join(written(shards, node=node) for node in theirs) for theirs in nodes]
    over_ranks = add_up(Node(0, len(nodes)), lambda a, b: f"({a} {b})", of_rank.__getitem__, {})
    assert is_tree_over_ranks(Node(0, shards), nodes) == (over_ranks == written(shards))


def test_the_core_adds_where_every_rank_has_one_shard():
    for ranks in range(1, 20):
        assert is_tree_over_ranks(Node(0, ranks), [[Node(rank, rank + 1)] for rank in range(ranks)])
    assert not is_tree_over_ranks(Node(0, 2), [[Node(0, 2)], []])


@given(st.integers(0, 200), st.integers(1, 20))
def test_the_runs_of_the_ranks_follow_each_other(shards, ranks):
    runs = [run_of_rank(shards, ranks, rank) for rank in range(ranks)]
    assert [shard for run in runs for shard in run] == list(range(shards))


def test_a_random_stream_depends_on_its_key_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with random_stream(1, 2):
        first = (torch.rand(2).tolist(), random.random())
    assert torch.equal(torch.rand(1), expected)
    with random_stream(1, 2):
        assert (torch.rand(2).tolist(), random.random()) == first
    with random_stream(1, 3):
        assert (torch.rand(2).tolist(), random.random()) != first


def test_tensors_of_several_types_are_packed_and_unpacked():
    tensors = [torch.ones(2, 3), torch.zeros(0), torch.ones(()).double(), torch.arange(4.0).reshape(2, 2).t()]
    packed = pack(tensors)
    cpu = torch.device("cpu")
    assert {kind: flat.numel() for kind, flat in packed.items()} == {(torch.float32, cpu): 10, (torch.float64, cpu): 1}
    for one, other in zip(unpack(packed, tensors), tensors, strict=True):
        assert torch.equal(one, other)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_plan_has_each_sample_once(samples, shards, batch_size, shuffle):
    plan = EpochPlan.of(1, samples, shards, batch_size, seed=3, shuffle=shuffle)
    steps = range(-(-samples // (shards * batch_size)))
    planned = [plan.samples_of(step, shard) for step in steps for shard in range(shards)]
    assert sorted(itertools.chain(*planned)) == [*range(samples)]
    assert [*map(len, planned)] == [plan.count_of(step, shard) for step in steps for shard in range(shards)]
    assert [rest for _, *rest in plan.batches(steps, range(shards))] == [each for each in planned if each]


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
