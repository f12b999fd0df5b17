"""Choice of an algorithm by name and operation."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.algorithms import build
from paceline.comm.schedule.steps import Operation


def test_an_algorithm_without_the_operation_names_the_others():
    with pytest.raises(ValueError, match=r"star does not support all_to_all; these do: ring"):
        build("star", Operation.ALL_TO_ALL, 0, 4)


def test_an_unknown_algorithm_is_answered_with_the_known():
    with pytest.raises(ValueError, match=r"unknown algorithm 'rign'; the algorithms are ring, halving_doubling, tree"):
        build("rign", Operation.ALL_REDUCE, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ring", Operation.ALL_REDUCE, 4, 4), "rank 4 is not in a world of 4"),
        (("ring", Operation.BROADCAST, 0, 4), "broadcast requires a root from 0 to 3"),
        (("ring", Operation.ALL_REDUCE, 0, 4, 1), "all_reduce has no root"),
        (("hierarchical", Operation.ALL_REDUCE, 0, 4), "needs hosts"),
        (("hierarchical", Operation.ALL_REDUCE, 0, 4, -1, [[0, 1], [1, 2, 3]]), "each of the 4 ranks once"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        build(*arguments)
