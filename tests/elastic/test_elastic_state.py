"""The usual loop in an elastic job: each sample is used once, and each step applies the mean over its samples."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import elastic_job
import elastic_usual
import pytest
import torch
from elastic_job import Outcome
from elastic_usual import BATCH, RATE, SAMPLES
from torch import nn

from paceline.train.elastic.failpoints import POINTS, POINTS_OF_DDP_LOOPS

WORKERS = ("0.0.0", "0.1.0", "0.2.0")
EPOCHS = 2
# Failpoints that are reached only if a member lacks a result that another member has.
RARE = {"result.taken"}
# Pairs of a late worker and a killed worker. In the suite, each worker is late once and killed once.
PAIRS = [(late, worker) for late in WORKERS for worker in WORKERS]
ALL_PAIRS = pytest.param(PAIRS, marks=pytest.mark.soak, id="all")
SOME_PAIRS = pytest.param([("0.0.0", "0.0.0"), ("0.1.0", "0.2.0"), ("0.2.0", "0.1.0")], id="some")
# The workers to kill: two of three in the suite.
ALL = pytest.param(WORKERS, marks=pytest.mark.soak, id="all")
SOME = pytest.param(("0.0.0", "0.2.0"), id="some")
SWEPT = [point for point in (*POINTS, *POINTS_OF_DDP_LOOPS) if point not in RARE]


def run(
    failpoints: str = "", step_s: float = 0.003, workers: int = 3, epochs: int = EPOCHS, **options: object
) -> Outcome:
    return elastic_job.run(
        functools.partial(elastic_usual.train, epochs, step_s, **options),
        workers=workers,
        failpoints=failpoints,
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
    )


def result_of(outcome: Outcome) -> dict[str, Any]:
    """Returns the result, which must be the same on all workers that have finished."""
    assert outcome.code == 0, outcome
    assert outcome.errors == {}, outcome
    first, *others = outcome.results.values()
    assert isinstance(first, dict)
    assert all(each == first for each in others), outcome.results
    return first


def require_each_sample_once(result: dict[str, Any], epochs: int = EPOCHS) -> None:
    """Asserts that each epoch has used each sample in exactly one committed step."""
    used = [index for step in result["shares"] for index in step]
    assert len(used) == epochs * SAMPLES
    for at in range(0, len(used), SAMPLES):
        assert sorted(used[at : at + SAMPLES]) == list(range(SAMPLES))
    assert all(result["shares"])


def require_reference(result: dict[str, Any]) -> None:
    """Asserts that parameters equal those of one process that averages in float64, using the recorded shares."""
    torch.manual_seed(0)
    model = elastic_usual.Counted(centers=False).double()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=RATE, momentum=0.5)
    _, inputs, targets = elastic_usual.dataset().tensors
    for step in result["shares"]:
        optimizer.zero_grad()
        chosen = torch.tensor(list(step))
        losses = nn.functional.cross_entropy(model.net(inputs[chosen].double()), targets[chosen], reduction="none")
        (losses * torch.tensor([*step.values()], dtype=torch.float64)).sum().backward()
        assert sum(step.values()) == pytest.approx(1, abs=1e-5)
        optimizer.step()
    for param, found in zip(model.net.parameters(), result["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), param.detach(), rtol=1e-4, atol=1e-6)


def test_undisturbed_steps_are_those_of_ddp() -> None:
    result = result_of(run(centers=False))
    require_each_sample_once(result)
    require_reference(result)
    for step in result["shares"][:3]:
        assert [*step.values()] == pytest.approx([1 / (3 * BATCH)] * 3 * BATCH)
    # The last step has 4 samples for 3 ranks: one rank has 2 samples, and all ranks have the same weight.
    assert sorted(result["shares"][3].values()) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert result["views"] == [[3, [*WORKERS], []]]


def test_weights_make_it_the_mean_over_samples() -> None:
    result = result_of(run(centers=False, weighs=True))
    require_each_sample_once(result)
    require_reference(result)
    assert [*result["shares"][3].values()] == pytest.approx([1 / 4] * 4)


@pytest.mark.parametrize("workers", [SOME, ALL])
@pytest.mark.parametrize("point", SWEPT)
def test_a_worker_may_be_killed_at_any_point(point: str, workers: tuple[str, ...]) -> None:
    fired = []
    for worker in workers:
        count = 2 if point.startswith(("round", "batch", "mean")) else 1  # the others are reached at most once
        outcome = run(f"{worker}:{point}@{count}=kill")
        result = result_of(outcome)
        require_each_sample_once(result)
        require_reference(result)
        fired += [worker] * (outcome.ended[worker] == -9)
    assert fired, f"{point} was never reached"


@pytest.mark.parametrize("point", ["round.begun", "mean.weighed", "round.summed", "round.voted", "batch.dealt"])
def test_two_workers_may_be_killed_at_once(point: str) -> None:
    outcome = run(f"0.1.0:{point}@3=kill,0.2.0:{point}@3=kill")
    result = result_of(outcome)
    assert outcome.ended["0.1.0"] == outcome.ended["0.2.0"] == -9
    require_each_sample_once(result)
    require_reference(result)


# Each failpoint, and the worker whose connections fail there. The suite uses one worker per failpoint, in turn.
LOSSES = [
    pytest.param(point, worker, marks=[pytest.mark.soak] if at % 3 != number else [])
    for at, point in enumerate(["mean.weighed", "round.computed", "round.summed", "round.voted"])
    for number, worker in enumerate(WORKERS)
]


@pytest.mark.parametrize(("point", "worker"), LOSSES)
def test_lost_connections_lose_no_sample(point: str, worker: str) -> None:
    outcome = run(f"{worker}:{point}@3=lose")
    result = result_of(outcome)
    assert set(outcome.ended) == set(WORKERS)
    require_each_sample_once(result)
    require_reference(result)
    assert len(result["shares"]) == 4 * EPOCHS


@pytest.mark.parametrize("pairs", [SOME_PAIRS, ALL_PAIRS])
@pytest.mark.parametrize("point", sorted(RARE))
def test_who_takes_a_committed_mean_may_be_killed(point: str, pairs: list[tuple[str, str]]) -> None:
    fired = []
    for late, worker in pairs:
        outcome = run(f"{late}:round.voted@3=lose,{worker}:{point}@1=kill")
        result = result_of(outcome)
        require_each_sample_once(result)
        require_reference(result)
        fired += [worker] * (outcome.ended[worker] == -9)
    assert fired, f"{point} was never reached"


@pytest.mark.parametrize("point", ["round.begun", "round.voted", "mean.applied"])
def test_buffers_follow_the_first_worker_that_counts(point: str) -> None:
    result = result_of(run(f"0.0.0:{point}@2=kill", centers=True))
    require_each_sample_once(result)
    _, batches, has_begun = result["buffers"]
    assert batches == len(result["shares"])
    assert has_begun is True


def test_newcomers_take_part_and_views_are_told() -> None:
    result = result_of(run("0.1.0:round.voted@2=kill", epochs=6, complete=3))
    require_each_sample_once(result, 6)
    require_reference(result)
    first, *later = result["views"]
    assert first == [3, [*WORKERS], []]
    came = [name for _, names, _ in later for name in names]
    went = [name for _, _, names in later for name in names]
    assert came == ["0.1.1"]
    assert went == ["0.1.0"]
    assert later[-1][0] == 3


def test_a_batch_is_dealt_out_alike_across_views() -> None:
    # A newcomer has joined. Worker 0.0.0 loses the view before it begins the batch, 0.2.0 begins the batch in that
    # view, and the newcomer dies.
    failpoints = "0.1.0:round.voted@2=kill,0.0.0:view.agreed@3=lose,0.1.1:batch.dealt@1=kill"
    outcome = run(failpoints, epochs=6, complete=3)
    result = result_of(outcome)
    assert outcome.ended["0.1.1"] == -9
    require_each_sample_once(result, 6)
    require_reference(result)


@pytest.mark.parametrize("kind", ["sample", "error"])
def test_a_skipped_batch_counts_on_no_rank(kind: str) -> None:
    result = result_of(run(skips=kind))
    used = [index for step in result["shares"] for index in step]
    assert 7 not in used
    assert max(Counter(used).values()) == EPOCHS
    assert len(used) >= EPOCHS * (SAMPLES - BATCH)  # in each epoch only the batch with sample 7 is missing
    require_reference(result)


def test_a_step_that_all_skip_changes_nothing() -> None:
    result = result_of(run(skips="step"))
    assert result["shares"][2] == {}
    del result["shares"][2]
    require_reference(result)


def test_a_rank_without_backward_is_told_to_skip() -> None:
    outcome = elastic_job.run(elastic_usual.careless, 1, workers=2)
    assert outcome.code == 0, outcome
    ((worker, error),) = outcome.errors.items()
    assert worker == "0.1.0"
    assert "had no backward" in error
    assert "state.skip_batch()" in error


@pytest.mark.parametrize(
    "failpoints",
    [
        "0.1.0:round.computed@2=kill",  # in the middle of the stream
        "0.2.0:mean.weighed@4=kill",  # in the last step of the stream
        "0.1.0:round.computed@2=kill,0.2.0:batch.dealt@5=kill",  # while samples are repeated
    ],
)
def test_each_sample_of_a_stream_counts_once(failpoints: str) -> None:
    outcome = run(failpoints, streams=True)
    result = result_of(outcome)
    assert -9 in outcome.ended.values()
    require_each_sample_once(result)
    require_reference(result)


def test_a_stream_that_processes_read_counts_once() -> None:
    outcome = run("0.1.0:round.computed@2=kill", streams=True, num_workers=2)
    result = result_of(outcome)
    assert outcome.ended["0.1.0"] == -9
    require_each_sample_once(result)
