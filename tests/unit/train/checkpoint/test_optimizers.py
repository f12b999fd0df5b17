"""Numbering of the parameters in an optimizer's state."""

from __future__ import annotations

import doctest
from importlib import import_module

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.train.checkpoint.optimizers import Numbering, agreed


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_numbers_are_those_of_the_whole_models_optimizer(group_of, ranks, random):
    """Each parameter of the whole model is in exactly one group, and on one or more ranks."""
    having = [random.sample(range(ranks), random.randint(1, ranks)) for _ in group_of]
    outlines = [
        {
            "optimizer": [
                [place for place, its in enumerate(group_of) if its == group and rank in having[place]]
                for group in range(3)
            ]
        }
        for rank in range(ranks)
    ]
    numbering = agreed(outlines)["optimizer"]
    order = [place for group, place in sorted((its, place) for place, its in enumerate(group_of))]
    assert numbering.of(order) == list(range(len(group_of)))
    assert [len(each) for each in numbering.groups] == [group_of.count(group) for group in range(3)]


def test_examples_of_the_numbering_run():
    assert doctest.testmod(import_module("paceline.train.checkpoint.optimizers")).failed == 0
    assert doctest.testmod(import_module("paceline.train.checkpoint.format.regions")).failed == 0
    assert Numbering([[1], [0]]).of([0, 1]) == [1, 0]
