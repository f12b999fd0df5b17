"""The ring algorithms: neighbors, number of rounds and amount of data."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.algorithms import build
from paceline.comm.schedule.steps import ROOTED, Operation, StepKind


def steps_of(operation: Operation, n: int, kind: StepKind, rank: int = 1) -> list:
    return [
        step for step in build("ring", operation, rank, n, 0 if operation in ROOTED else -1).steps if step.kind is kind
    ]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_an_all_reduce_sends_to_the_right_only(n):
    sent = steps_of(Operation.ALL_REDUCE, n, StepKind.SEND)
    assert {step.peer for step in sent} == {2 % n}
    assert sum(step.src.length for step in sent) == 2 * (n - 1)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_an_all_reduce_receives_only_from_the_left(n):
    received = steps_of(Operation.ALL_REDUCE, n, StepKind.RECV) + steps_of(Operation.ALL_REDUCE, n, StepKind.REDUCE)
    assert {step.peer for step in received} == {0}


def test_a_broadcast_ends_at_the_left_neighbor_of_the_root():
    assert steps_of(Operation.BROADCAST, 4, StepKind.SEND, rank=3) == []
    assert [step.peer for step in steps_of(Operation.BROADCAST, 4, StepKind.RECV, rank=3)] == [2]
