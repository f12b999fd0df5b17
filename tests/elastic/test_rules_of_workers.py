"""Each rule of an elastic worker has a test that fails if the rule is disabled."""

from __future__ import annotations

import signal
from collections import Counter

import elastic_job
import elastic_programs
import pytest
from elastic_job import Job, Outcome
from elastic_mutations import RULES, run_without

from paceline.train.elastic.protocol import ViewFailed, ViewInstalled

POLICY = {"gather_s": 0.02, "start_patience_s": 20.0}


def run(rule: str, program: object, *arguments: object, **options: object) -> Outcome:
    outcome = elastic_job.run(
        run_without, rule, program, *arguments, policy=POLICY, replaces=False, timeout_s=30, **options
    )
    assert outcome.code == 0, outcome
    return outcome


def only_missing_shards_are_computed_again(rule: str) -> None:
    failpoints = "0.1.0:round.summed@1=kill"
    outcome = run(rule, elastic_programs.count_shards, 3, workers=2, failpoints=failpoints)
    assert outcome.ended["0.1.0"] == -9
    assert outcome.results == {"0.0.0": 3 * elastic_programs.SHARDS}, "sums were computed again"


def a_broken_view_is_not_entered_again(rule: str) -> None:
    outcome = run(rule, elastic_programs.train, 2, failpoints="0.0.0:round.computed@2=lose")
    broken = Counter((uid, said.generation) for _, uid, said in outcome.heard if isinstance(said, ViewFailed))
    assert len(broken) == 3
    assert set(broken.values()) == {1}, "a view broke twice"


def a_worker_that_wakes_up_too_late_ends(rule: str) -> None:
    acts: list[str] = []

    def stop_one(job: Job) -> None:
        installed = [(uid, said.generation) for _, uid, said in job.outcome.heard if isinstance(said, ViewInstalled)]
        first = min((generation for _, generation in installed), default=0)
        if not acts and ("0.1.0", first) in installed:
            acts.append("stop")
            job.stall("0.1.0")
        elif acts == ["stop"] and {uid for uid, generation in installed if generation > first} == {"0.0.0", "0.2.0"}:
            acts.append("wake")
            job.kill("0.1.0", signal.SIGCONT)

    outcome = run(rule, elastic_programs.train, 10, elastic_programs.SHARDS, 0.02, meddle=stop_one)
    assert acts == ["stop", "wake"]
    assert {"0.0.0", "0.2.0"} <= outcome.results.keys()
    assert outcome.ended["0.1.0"] == 75, "it went on"


def a_worker_with_another_state_ends(rule: str) -> None:
    outcome = run(rule, elastic_programs.train_with_a_fault, 10, "0.1.0", "memory")
    assert outcome.ended["0.1.0"] == 76, "nobody noticed"


CHECKS = {
    "kept sums": (only_missing_shards_are_computed_again, "sums were computed again"),
    "generations": (a_broken_view_is_not_entered_again, "a view broke twice"),
    "fencing": (a_worker_that_wakes_up_too_late_ends, "it went on"),
    "digests": (a_worker_with_another_state_ends, "nobody noticed"),
}


def test_every_rule_that_can_be_missing_has_a_check() -> None:
    assert CHECKS.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CHECKS)
def test_workers_follow_the_rule(rule: str) -> None:
    check, _ = CHECKS[rule]
    check("")


@pytest.mark.parametrize("rule", CHECKS)
def test_a_missing_rule_is_noticed(rule: str) -> None:
    check, complaint = CHECKS[rule]
    with pytest.raises(AssertionError, match=complaint):
        check(rule)
