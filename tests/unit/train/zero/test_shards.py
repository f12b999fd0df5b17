"""Ownership of parameters, and parameters that are gathered together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.train.zero.sharded_parameters import LayerOrder, find_units
from paceline.train.zero.shards import ALIGNMENT_BYTES, assign_to_ranks, is_elementwise

# The size of each in bytes, and whether it may be cut.
PARAMS = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=40)


@given(PARAMS, st.integers(1, 9))
def test_parameters_are_given_to_the_ranks_completely(params, ranks):
    parts = assign_to_ranks([size for size, _ in params], [cut for _, cut in params], [0] * ranks)
    for (size, cut), its_parts in zip(params, parts, strict=True):
        assert [part.start for part in its_parts] == [0, *(part.stop for part in its_parts[:-1])]
        assert its_parts[-1].stop == size
        assert len(its_parts) == len({part.owner for part in its_parts})
        assert cut or len(its_parts) == 1
        assert all(part.start % ALIGNMENT_BYTES == 0 for part in its_parts)


@given(PARAMS, st.integers(1, 9))
def test_no_rank_has_more_than_an_even_part_and_one_uncut(params, ranks):
    sizes, loads = [size for size, _ in params], [0] * ranks
    parts = assign_to_ranks(sizes, [cut for _, cut in params], loads)
    flat = [part for its_parts in parts for part in its_parts]
    assert loads == [sum(part.stop - part.start for part in flat if part.owner == rank) for rank in range(ranks)]
    largest_whole = max((size for size, cut in params if not cut), default=0)
    assert max(loads) <= 1.02 * (sum(sizes) / ranks + 1) + max(ALIGNMENT_BYTES * ranks, largest_whole)


@given(st.lists(st.integers(1, 50), min_size=1), st.lists(st.integers(1, 50)))
def test_later_parameters_go_to_the_ranks_with_least(first, later):
    loads = [0, 0, 0]
    assign_to_ranks(first, [False] * len(first), loads)
    before = list(loads)
    parts = assign_to_ranks(later, [False] * len(later), loads)
    assert not later or before[parts[later.index(max(later))][0].owner] == min(before)


def test_only_elementwise_optimizers_get_parts_of_parameters():
    class Derived(torch.optim.SGD):
        pass

    assert is_elementwise(torch.optim.AdamW)
    assert not is_elementwise(Derived)
    assert not is_elementwise(torch.optim.LBFGS)


def test_the_next_layer_is_the_one_of_the_pass_before():
    order = LayerOrder()
    assert [order.visit(layer) for layer in "abcd"] == [None, None, None, None]
    assert [order.visit(layer) for layer in "abcd"] == ["b", "c", "d", None]


def test_a_change_of_the_order_of_layers_is_learnt():
    order = LayerOrder()
    for layer in "abcd":
        order.visit(layer)
    assert [order.visit(layer) for layer in "acd"] == ["b", "d", None]
    assert [order.visit(layer) for layer in "ab"] == ["c", "c"]


def units_of(module: nn.Module) -> dict[str, int]:
    return {
        unit.name: sum(param.numel() for param in unit.params) for unit in find_units(module, list(module.parameters()))
    }


def test_the_layers_of_a_model_are_gathered_one_by_one():
    assert units_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))) == {"0": 6, "2": 9}


def test_a_layer_that_reads_its_childrens_parameters_is_whole():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    found = units_of(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False))
    assert found == {"layers.0": sum(p.numel() for p in layer.parameters()), "layers.1": found["layers.0"], "": 8}


def test_a_layer_within_a_layer_is_gathered_on_its_own():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())
            self.layers = nn.Sequential(nn.Linear(2, 2))

    assert units_of(nn.Sequential(Block())) == {"0": 1, "0.layers.0": 6}


def test_what_several_layers_share_belongs_to_the_whole_module():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    assert units_of(nn.Sequential(first, second)) == {"0": 2, "": 4}


def test_a_layer_that_is_used_twice_is_one():
    layer = nn.Linear(2, 2)
    assert units_of(nn.Sequential(layer, nn.ReLU(), layer)) == {"0": 6}


def test_parameters_that_are_not_asked_for_are_left_out():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [unit.name for unit in find_units(module, list(module[1].parameters()))] == ["1"]
