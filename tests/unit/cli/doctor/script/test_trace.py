"""Traces of ranks: events, the conditions on the paths to events, and descriptions of ranks."""

from __future__ import annotations

import ast

import pytest

from paceline.cli.doctor.script.trace import ExecutionPath, JobTrace, PathCondition, RankTrace, who
from paceline.cli.doctor.script.value import Fact

CALL = ast.parse("barrier()").body[0]
ON_RANK_0 = PathCondition(CALL, "rank == 0", True, frozenset({Fact.RANK}), True)
ON_DEBUG = PathCondition(CALL, "debug", True, frozenset(), True)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "only rank 2"),
        ([0, 1, 3], "every rank but 2"),
        ([0, 1], "only the ranks below 2"),
        ([1, 3], "of 4 ranks, only 1 and 3"),
    ],
)
def test_ranks_are_described_in_few_words(ranks, text):
    assert who(ranks, 4) == text


def test_an_event_has_the_innermost_test_of_the_rank():
    path = ExecutionPath(RankTrace(0), conditions=[ON_RANK_0, ON_DEBUG])
    path.record("collective", "barrier", CALL)
    (event,) = path.trace.of("collective")
    assert event.guard() is ON_RANK_0
    path.conditions = [ON_DEBUG]
    path.record("collective", "barrier", CALL)
    assert path.trace.events[-1].guard() is None


def test_calls_in_other_groups_are_not_counted():
    traces = [RankTrace(rank) for rank in range(2)]
    for trace in traces:
        ExecutionPath(trace).record("collective", "all_reduce", CALL, in_group=trace.rank == 1)
    job = JobTrace(ast.parse(""), traces, local_size=2, imported=RankTrace(0))
    assert job.counts("collective", phase="script") == [{"all_reduce": 1}, {}]
    assert [[len(events) for events in ranks] for ranks in job.by_node("collective")] == [[1, 1]]
