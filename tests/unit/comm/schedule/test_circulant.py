"""Circulant rounds: their number, and the order in which blocks are sent."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.circulant import circulant_rounds, send_order


@pytest.mark.parametrize("n", range(2, 40))
def test_rounds_of_two_parts_are_as_few_as_possible(n):
    assert len(circulant_rounds(n, 2)) == (n - 1).bit_length()


@pytest.mark.parametrize("n", range(2, 20))
def test_one_round_is_enough_if_every_member_is_a_part(n):
    assert len(circulant_rounds(n, n)) == 1


@pytest.mark.parametrize("radix", [2, 3, 4])
@pytest.mark.parametrize("n", [2, 5, 9])
def test_the_blocks_of_the_first_round_come_first(n, radix):
    width = circulant_rounds(n, radix)[0].width
    for me in range(n):
        order = send_order(n, me, radix)
        assert sorted(order) == list(range(n))
        assert order[: n - width] == [(me + distance) % n for distance in range(width, n)]
