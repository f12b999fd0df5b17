"""The binomial tree: parents, children and subtrees of its members."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.tree import children_of, parent_of, subtree_of

SIZES = range(1, 34)


@pytest.mark.parametrize("n", SIZES)
def test_every_member_is_a_child_of_its_parent_only(n):
    children = [child for member in range(n) for child in children_of(member, n)]
    assert sorted(children) == list(range(1, n))
    assert all(parent_of(child) == member for member in range(n) for child in children_of(member, n))


@pytest.mark.parametrize("n", SIZES)
def test_a_subtree_consists_of_those_of_the_children(n):
    for member in range(n):
        below = [each for child in children_of(member, n) for each in subtree_of(child, n)]
        assert [member, *below] == list(subtree_of(member, n))


@pytest.mark.parametrize("n", SIZES)
def test_the_root_is_reached_within_the_logarithm_of_the_members(n):
    for member in range(n):
        hops = 0
        while member:
            member, hops = parent_of(member), hops + 1
        assert hops <= (n - 1).bit_length()
