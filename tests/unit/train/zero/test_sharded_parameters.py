"""The layers of a model that are gathered one by one, and their order."""

from __future__ import annotations

from torch import nn

from paceline.train.zero.sharded_parameters import LayerOrder, find_units


def test_the_next_layer_is_the_one_of_the_pass_before():
    order = LayerOrder()
    assert [order.visit(layer) for layer in "abcd"] == [None, None, None, None]
    assert [order.visit(layer) for layer in "abcd"] == ["b", "c", "d", None]


def test_a_change_of_the_order_of_layers_is_learned():
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
