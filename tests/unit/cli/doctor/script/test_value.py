"""Abstract values: their truth values, and the results of operators."""

from __future__ import annotations

import ast

import pytest

from paceline.cli.doctor.script.value import AbstractValue, Fact, SimulatedRank, arithmetic, compare, either, known

RANK = known(3, frozenset({Fact.RANK}))


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (known(0), False),
        (known("x"), True),
        (AbstractValue("x"), None),
        (either([known(1), known(2)]), True),
        (either([known(0), known(2)]), None),
        (AbstractValue("Net()", called="Net"), True),
    ],
)
def test_a_truth_is_given_only_if_it_is_certain(value, truth):
    assert value.truth() is truth


def test_a_number_computed_from_the_rank_depends_on_the_rank():
    result = arithmetic(ast.Add(), RANK, known(4))
    assert result.constant == 7 and Fact.RANK in result.facts
    assert not arithmetic(ast.Add(), known(3), known(4)).facts


def test_an_operation_that_raises_has_no_known_result():
    assert not arithmetic(ast.Div(), RANK, known(0)).is_known


def test_a_comparison_with_the_rank_depends_on_the_rank():
    result = compare(ast.Eq(), RANK, known(0), SimulatedRank(3, 4, 4))
    assert result.constant is False and Fact.RANK in result.facts
