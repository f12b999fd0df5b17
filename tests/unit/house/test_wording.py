"""Phrases that messages share."""

from __future__ import annotations

import doctest

import paceline.errors
from paceline.errors import and_more


def test_long_lists_are_cut_and_counted():
    assert and_more(list(range(10)), most=8) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_short_lists_are_given_in_full():
    assert (and_more(["a", "b"], most=2), and_more([], most=2)) == ("a, b", "")


def test_the_examples_of_wording_run():
    assert doctest.testmod(paceline.errors).failed == 0
