"""Halving and doubling: few rounds, and the ranks beyond a power of two."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.algorithms import build
from paceline.comm.schedule.halving_doubling import disseminate_phase
from paceline.comm.schedule.steps import Operation, StepKind


def sent(n: int, rank: int) -> list:
    return [
        step for step in build("halving_doubling", Operation.ALL_REDUCE, rank, n).steps if step.kind is StepKind.SEND
    ]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_rank_has_as_many_partners_as_bits(bits):
    for rank in range(1 << bits):
        peers = {step.peer for step in sent(1 << bits, rank)}
        assert peers == {rank ^ (1 << bit) for bit in range(bits)}


def test_a_rank_beyond_a_power_of_two_has_one_partner():
    partners = [{step.peer for step in sent(5, rank)} for rank in range(5)]
    assert min(map(len, partners)) == 1


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
def test_a_barrier_has_few_rounds(n):
    for rank in range(n):
        rounds = [step for step in disseminate_phase(range(n), rank) if step.kind is StepKind.SEND]
        assert len(rounds) == (n - 1).bit_length()
