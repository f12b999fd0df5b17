"""Workers with faulty memory or wrong sums are detected and reported, and do not affect the other workers."""

from __future__ import annotations

import elastic_job
import elastic_programs
import pytest


def test_a_worker_whose_memory_changed_is_replaced():
    outcome = elastic_job.run(elastic_programs.train_with_a_fault, 20, "0.1.0", "memory", policy={"gather_s": 0.02})
    assert outcome.code == 0, outcome
    assert outcome.ended["0.1.0"] == 76
    assert len(set(outcome.results.values())) == 1
    assert {"0.0.0", "0.2.0"} <= outcome.results.keys()


def test_without_a_majority_changed_memory_ends_the_job():
    outcome = elastic_job.run(
        elastic_programs.train_with_a_fault, 20, "0.1.0", "memory", workers=2, replaces=False, timeout_s=30
    )
    assert outcome.code == 1
    (error,) = set(outcome.errors.values())
    assert error.startswith("DivergenceError: round ")
    assert "differs between the workers 0.0.0, 0.1.0, and there is no majority" in error


def test_an_audit_replaces_a_worker_whose_sums_are_wrong():
    # The first audit is in round 99. Until then, the state of every worker contains the wrong sums.
    outcome = elastic_job.run(elastic_programs.train_with_a_fault, 120, "0.1.0", "sums", policy={"gather_s": 0.02})
    assert outcome.code == 0, outcome
    assert outcome.ended["0.1.0"] == 76
    assert len(set(outcome.results.values())) == 1


# Round 16 checks the memory that changes, and round 99 is audited, so each fault is detected in the round in which it
# occurs.
@pytest.mark.parametrize(("fault", "since"), [("memory", 17), ("sums", 100)])
def test_what_an_outvoted_worker_computed_is_left_out(fault: str, since: int) -> None:
    def digests(workers: int, fault: str) -> set[object]:
        program = elastic_programs.train_with_a_fault
        outcome = elastic_job.run(program, 26, "0.1.0", fault, since, workers=workers, policy={"gather_s": 0.02})
        assert outcome.code == 0, outcome
        assert outcome.ended["0.1.0"] == 76 if fault else outcome.ended == {"0.0.0": 0}
        return {*outcome.results.values()}

    assert digests(3, fault) == digests(1, "")
