"""Whether gradients are reduced during backward, by the cores that the ranks of each host have."""

from __future__ import annotations

import pytest

from paceline.train.preconditions import RankFacts, reduces_during_backward


def rank(cores, *, told=None, host="here", local_ranks=0, quota=0.0, cgroup=0, threads=1) -> RankFacts:
    return RankFacts(told, host, local_ranks, list(cores), quota, cgroup, threads)


@pytest.mark.parametrize(
    ("everyones", "overlaps"),
    [
        ([rank(range(4)), rank(range(4))], True),
        ([rank(range(3)), rank(range(3))], False),
        ([rank(range(3), told=True), rank(range(3), told=True)], True),
        ([rank(range(8), told=False), rank(range(8))], False),
        ([rank(range(2)), rank(range(2, 4))], True),  # each has cores of its own
        ([rank(range(2), local_ranks=4), rank(range(2, 4), local_ranks=4)], True),
        ([rank(range(4), local_ranks=4), rank(range(4), local_ranks=4)], False),  # two more are not in the group
        ([rank(range(2)), rank(range(2), host="there")], True),
        ([rank(range(8), quota=3.0, cgroup=1), rank(range(8), quota=3.0, cgroup=1)], False),
        ([rank(range(8), quota=2.0, cgroup=1), rank(range(8), quota=2.0, cgroup=2)], True),
    ],
)
def test_every_rank_needs_a_core_for_its_progress(everyones, overlaps):
    assert reduces_during_backward(everyones) is overlaps
