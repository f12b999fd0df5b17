"""Versions of Paceline on the ranks that form a group."""

from __future__ import annotations

import json

import pytest

import paceline as dist
from paceline.comm.engine.adapters.library_engine import exit_of
from paceline.comm.engine.formation import describe_rank, read_ranks


def test_ranks_of_one_version_know_each_other():
    ranks, entries = read_ranks([describe_rank(socket="a").encode(), describe_rank(socket="b").encode()], 0)
    assert [str(rank).partition(" (")[0] for rank in ranks] == ["rank 0", "rank 1"]
    assert [entry["socket"] for entry in entries] == ["a", "b"]
    assert exit_of(dist.HashStore(), ranks[1]) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (json.dumps({"version": "7.1", "host": "alpha", "pid": 11}), "7.1 on rank 1 (alpha, pid 11)"),
        (json.dumps({"version": "7.1", "where": ["alpha", 11]}), "7.1 on rank 1"),
        (json.dumps({"host_id": "x", "host": "alpha", "pid": 11}), "a version before 0.1.0 on rank 1 (alpha, pid 11)"),
        (json.dumps(["alpha", 11]), "a version before 0.1.0 on rank 1"),
        ("\x80", "a version before 0.1.0 on rank 1"),
    ],
)
def test_ranks_of_different_versions_are_refused_with_both(answer, told):
    with pytest.raises(dist.RendezvousError, match="different versions of Paceline") as caught:
        read_ranks([describe_rank().encode(), answer.encode()], 0)
    assert f"{dist.__version__} on rank 0 (" in str(caught.value) and told in str(caught.value)
