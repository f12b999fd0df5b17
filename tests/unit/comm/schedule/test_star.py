"""The star algorithms: all messages are between one rank and the others."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.algorithms import ALGORITHMS, build
from paceline.comm.schedule.steps import ROOTED, Operation, StepKind


@pytest.mark.parametrize("operation", sorted(ALGORITHMS["star"]))
def test_other_ranks_have_messages_with_the_center_only(operation: Operation):
    root = 2 if operation in ROOTED else -1
    center = max(root, 0)
    for rank in set(range(5)) - {center}:
        steps = build("star", operation, rank, 5, root).steps
        assert {step.peer for step in steps if step.kind in (StepKind.SEND, StepKind.RECV, StepKind.REDUCE)} == {center}
