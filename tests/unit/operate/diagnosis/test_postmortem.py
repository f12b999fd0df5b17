"""Reports about a job that has ended, based on its files."""

from __future__ import annotations

import json

import pytest

from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    GroupMembership,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankState,
)
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, encode
from paceline.operate.diagnosis.postmortem import read_job, verdict_on

SUM = CallSignature("all_reduce", "float32", 4096, "SUM")


@pytest.fixture
def stalled(tmp_path):
    """Returns a function from a job's final state to its verdict; rank 0 waited for rank 1, which was stopped."""
    seats = [{"g": GroupMembership(rank, 2, "default")} for rank in range(2)]
    past = tuple(RankCall("g", number, SUM, float(number), number + 0.5, "ok") for number in range(1, 4))
    waits = (*past, RankCall("g", 4, SUM, 4.0))
    stopped = ProcessActivity(ProcessState.STOPPED)
    ranks = (
        RankState(0, "h", 7, seats[0], waits, process=ProcessActivity(ProcessState.SLEEPS)),
        RankState(1, "h", 8, seats[1], past, process=stopped, since_s=4.0),
    )
    (tmp_path / "stall-h-1.json").write_text(encode(MachineSnapshot(20.0, ranks)))

    def ended(state: str):
        facts = {"job": "j", "command": [], "host": "h", "workers": 2, "started_s": 1.0, "state": state}
        (tmp_path / "job.json").write_text(json.dumps(facts))
        return verdict_on(read_job(tmp_path))

    return ended


def test_a_stall_is_a_note_once_the_job_has_finished(stalled):
    verdict = stalled("finished")
    assert verdict.sentence.startswith(
        "the job stalled and later continued; observed during the stall: rank 0 waits in all_reduce"
    )
    assert "rank 1 has not reached this call: it is stopped by a signal" in verdict.sentence
    assert verdict.blamed == (1,) and not verdict.is_fault


def test_a_stall_in_which_the_job_was_stopped_is_its_fault(stalled):
    verdict = stalled("stopped")
    assert verdict.sentence.startswith("observed before the job ended: rank 0 waits in all_reduce")
    assert verdict.is_fault
