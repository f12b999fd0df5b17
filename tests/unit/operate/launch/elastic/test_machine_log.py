"""A machine's log of its workers' messages and failures."""

from __future__ import annotations

from paceline.operate.launch.elastic.machine_log import (
    MOST_FAILURES,
    ReplayableMessages,
    ReportedFailures,
)
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.train.elastic.protocol import (
    LeaveNotice,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
)


def test_a_standing_keeps_what_still_matters():
    standing = ReplayableMessages()
    for message in (
        WorkerReady("x"),
        ViewInstalled(1, 0),
        ViewFailed(1, 4, "lost"),
        ViewInstalled(2, 4),
        ViewFailed(2, 5, "lost"),
    ):
        standing.receive(message)
    assert standing.messages == [WorkerReady("x"), ViewInstalled(2, 4), ViewFailed(2, 5, "lost")]
    standing.receive(LeaveNotice("SIGTERM"))
    standing.receive(WorkerReady("x"))
    assert standing.messages == [LeaveNotice("SIGTERM"), WorkerReady("x")]


def failure(rank: int, time_s: float = 0.0, text: str = "oh") -> WorkerFailure:
    return WorkerFailure(rank, 100 + rank, 1, time_s, Record(time_s, "ValueError", text), host="h")


def test_blame_knows_each_failure_once_and_not_too_many():
    blame = ReportedFailures()
    assert blame.add([failure(0)]) and not blame.add([failure(0)])
    assert blame.add(failure(rank, 1.0, "x" * 9999) for rank in range(1, 2 * MOST_FAILURES))
    assert len(blame.failures) == MOST_FAILURES
    assert sum(len(each.record.text) for each in blame.failures) < 1001 * MOST_FAILURES
    assert not blame.add([failure(999)])
