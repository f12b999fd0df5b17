"""DiLoCo in an elastic job: workers die during outer exchanges, and new ones receive the outer state."""

from __future__ import annotations

import elastic_job
import elastic_outer
import pytest
import torch
from elastic_job import Outcome
from local_reference import Reference, inner_step

WORKERS = ("0.0.0", "0.1.0", "0.2.0")
STEPS = 14


def run(failpoints: str = "", delay: int = 0, replaces: bool = False, **options: object) -> Outcome:
    outcome = elastic_job.run(
        elastic_outer.train,
        STEPS,
        delay,
        3 if replaces else 0,
        failpoints=failpoints,
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
        replaces=replaces,
        **options,
    )
    assert outcome.code == 0, outcome
    assert outcome.errors == {}, outcome
    return outcome


def require_agreement(outcome: Outcome) -> None:
    """Asserts that all workers that have finished have the same parameters and outer state."""
    first, *others = outcome.results.values()
    for each in others:
        assert each["digest"] == first["digest"]
        assert each["parameters"] == first["parameters"] == first["outer"]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_undisturbed_workers_train_as_ranks_do(delay: int) -> None:
    outcome = run(delay=delay)
    require_agreement(outcome)
    reference = Reference(3, 4, 2, delay, 0.0, 0.7, 0.9)
    reference.optimizers = [torch.optim.AdamW(each.parameters(), lr=elastic_outer.RATE) for each in reference.models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(reference.models, reference.optimizers, strict=True)):
            inner_step(model, optimizer, rank, step)
        reference.exchange(step + 1)
    reference.use_rest()
    found = outcome.results[WORKERS[0]]["parameters"]
    for param, wanted in zip(found, reference.mean(), strict=True):
        torch.testing.assert_close(torch.tensor(param), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("point", ["batch.begun", "mean.weighed", "round.summed", "round.voted", "round.committed"])
def test_a_worker_may_die_in_an_outer_exchange(point: str, delay: int) -> None:
    outcome = run(f"0.1.0:{point}@3=kill", delay)
    assert outcome.ended["0.1.0"] == -9
    assert set(outcome.results) == {"0.0.0", "0.2.0"}
    require_agreement(outcome)
    assert [view[0] for view in outcome.results["0.0.0"]["views"]] == [3, 2]


@pytest.mark.parametrize("delay", [0, 3])
def test_a_worker_that_comes_gets_the_outer_state(delay: int) -> None:
    outcome = run("0.1.0:round.summed@2=kill", delay, replaces=True)
    assert set(outcome.results) == {"0.0.0", "0.1.1", "0.2.0"}
    require_agreement(outcome)
    assert outcome.results["0.1.1"]["joined_at"] > 0
    assert outcome.results["0.0.0"]["views"][-1] == [3, ["0.1.1"]]


def test_two_workers_may_die_and_connections_break() -> None:
    outcome = run("0.1.0:mean.weighed@2=kill,0.2.0:round.summed@2=kill,0.0.0:round.voted@4=lose")
    assert set(outcome.results) == {"0.0.0"}


def test_what_an_elastic_job_cannot_have_is_refused(ranks) -> None:
    ranks(1)(elastic_outer.refused)
