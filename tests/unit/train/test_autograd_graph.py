"""Tensors in the outputs of a module, and the parameters in their graph."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from paceline.train.autograd_graph import find_tensors, used_parameters

Pair = namedtuple("Pair", "left right")


@dataclass
class Answer:
    logits: torch.Tensor
    extra: object = None


@pytest.mark.parametrize(
    "nest",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, (b,)),
        lambda a, b: {"a": a, "more": {"b": b}},
        lambda a, b: OrderedDict(a=a, b=[b, 3, None]),
        lambda a, b: Pair(a, b),
        lambda a, b: Answer(a, Answer(b)),
        lambda a, b: {a, b},
    ],
)
def test_tensors_are_found_in_any_nest(nest):
    a, b = torch.ones(1), torch.zeros(1)
    assert {id(tensor) for tensor in find_tensors(nest(a, b))} == {id(a), id(b)}


def test_only_the_parameters_in_the_graph_are_used():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    used = used_parameters([torch.relu(a(torch.ones(1, 2))), c])
    assert used == {id(a.weight), id(a.bias), id(c)}
    assert id(b.weight) not in used


def test_what_contains_itself_is_looked_into_once():
    tensor = torch.ones(1)
    outer: list[object] = [tensor]
    outer += [outer, {"outer": outer}, (tensor,)]
    assert [id(each) for each in find_tensors(outer)] == [id(tensor)] * 2
