"""The order of summation over shards, and the state that belongs to a shard."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    """The core's tree is over ranks; `cuts` is true where one rank's shards end and the next rank's begin."""
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


def test_tensors_of_several_types_are_packed_and_unpacked():
    tensors = [torch.ones(2, 3), torch.zeros(0), torch.ones(()).double(), torch.arange(4.0).reshape(2, 2).t()]
    packed = pack(tensors)
    cpu = torch.device("cpu")
    assert {kind: flat.numel() for kind, flat in packed.items()} == {(torch.float32, cpu): 10, (torch.float64, cpu): 1}
    for one, other in zip(unpack(packed, tensors), tensors, strict=True):
        assert torch.equal(one, other)
