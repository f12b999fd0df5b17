"""Snapshots of machines: their encoding, and how they are merged into the snapshot of a job."""

from __future__ import annotations

import pytest

from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, decode, encode, job_snapshot_of


def rank(number: int, *calls: RankCall) -> RankState:
    return RankState(number, calls=calls)


def call(sequence: int, arrived_s: float, ended_s: float | None = None) -> RankCall:
    return RankCall("g", sequence, CallSignature("barrier"), arrived_s, ended_s, "ok" if ended_s else "")


def test_a_snapshot_comes_back_as_it_was():
    snapshot = MachineSnapshot(10.0, (rank(1, call(1, 2.0, 3.0), call(2, 4.0)),), 4.0)
    assert decode(encode(snapshot)) == snapshot


def test_the_latest_and_the_open_calls_are_sent():
    history = (call(1, 0.5), *(call(number, number, number + 0.5) for number in range(2, 100_000)))
    sent = decode(encode(MachineSnapshot(1.0, (rank(0, *history),)))).ranks[0].calls
    assert sent[0] == history[0] and sent[-1] == history[-1]
    assert len(sent) < len(history) // 2


@pytest.mark.parametrize("body", ["", "[]", '{"taken_s": "soon", "ranks": []}'])
def test_anything_else_is_refused(body):
    with pytest.raises(ValueError, match="."):
        decode(body)


def test_machines_with_different_clocks_are_put_on_one():
    one = MachineSnapshot(100.0, (rank(1, call(1, 90.0)),))
    other = MachineSnapshot(7000.0, (rank(0, call(1, 6990.0)),))
    job = job_snapshot_of([one, other])
    assert [(state.rank, state.calls[0].arrived_s) for state in job.ranks] == [(0, -10.0), (1, -10.0)]
