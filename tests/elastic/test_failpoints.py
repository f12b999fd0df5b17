"""Kills elastic workers at every failpoint: the result is bitwise equal to that of an undisturbed run."""

from __future__ import annotations

from typing import Any

import elastic_job
import elastic_programs
import pytest
from elastic_job import Outcome

from paceline.train.elastic.failpoints import POINTS

WORKERS = ("0.0.0", "0.1.0", "0.2.0")
EPOCHS = 2
# Each worker is killed when it reaches a failpoint for the first or for the second time.
KILLS = [(worker, count) for worker in WORKERS for count in (1, 2)]
# Pairs of a late worker and a killed worker. In the suite, each worker is late once and killed once.
PAIRS = [(late, worker) for late in WORKERS for worker in WORKERS]
ALL_PAIRS = pytest.param(PAIRS, marks=pytest.mark.soak, id="all")
SOME_PAIRS = pytest.param([("0.0.0", "0.0.0"), ("0.1.0", "0.2.0"), ("0.2.0", "0.1.0")], id="some")
# Failpoints that are reached only if a member has not yet received a round that others have committed.
RARE = {"result.taken"}
SWEPT = [point for point in POINTS if point not in RARE]


def some_kills(point: str) -> list[tuple[str, int]]:
    """Returns a worker to kill when it first reaches the failpoint, and one to kill the second time it does.

    The first one is 0.0.0 if only the sender of the state reaches the failpoint.
    """
    return [("0.0.0" if point in ("state.before_sending", "state.sent") else "0.2.0", 1), ("0.1.0", 2)]


def in_turn(points: list[str], workers: tuple[str, ...]) -> list[Any]:
    """Pairs each failpoint with each worker or, in the suite, with only one worker."""
    return [
        pytest.param(point, worker, marks=[pytest.mark.soak] if at % len(workers) != number else [])
        for at, point in enumerate(points)
        for number, worker in enumerate(workers)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Returns the digest of an undisturbed run with a single worker."""
    outcome = elastic_job.run(elastic_programs.train, EPOCHS, workers=1)
    (digest,) = outcome.results.values()
    assert isinstance(digest, str)
    return digest


def run(failpoints: str, num_workers: int = 0) -> Outcome:
    return elastic_job.run(
        elastic_programs.train,
        EPOCHS,
        elastic_programs.SHARDS,
        0.005,
        num_workers,
        failpoints=failpoints,
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
    )


def require_undisturbed(outcome: Outcome, expected: str) -> None:
    assert outcome.code == 0, outcome
    assert outcome.errors == {}
    assert {*outcome.results.values()} == {expected}, outcome


@pytest.mark.parametrize(
    ("point", "kills"),
    [
        *(pytest.param(point, some_kills(point), id=f"{point}-some") for point in SWEPT),
        *(pytest.param(point, KILLS, marks=pytest.mark.soak, id=f"{point}-all") for point in SWEPT),
    ],
)
def test_a_worker_may_be_killed_at_any_point(point: str, kills: list[tuple[str, int]], undisturbed: str) -> None:
    fired = []
    for worker, count in kills:
        outcome = run(f"{worker}:{point}@{count}=kill")
        require_undisturbed(outcome, undisturbed)
        fired += [worker] * (outcome.ended[worker] == -9)
    assert fired, f"{point} was never reached"


@pytest.mark.parametrize(("point", "worker"), in_turn(SWEPT, ("0.0.0", "0.2.0")))
def test_a_second_worker_may_be_killed_meanwhile(point: str, worker: str, undisturbed: str) -> None:
    outcome = run(f"0.1.0:round.computed@2=kill,{worker}:{point}@2=kill")
    require_undisturbed(outcome, undisturbed)
    assert outcome.ended["0.1.0"] == -9
    is_reached_twice = not point.startswith(("loop.over", "join.ready", "state."))
    assert outcome.ended[worker] == -9 or not is_reached_twice, f"{point} was never reached twice"


OF_CONNECTIONS = ["view.entering", "view.formed", "view.agreed", "round.computed", "round.summed", "round.voted"]


@pytest.mark.parametrize(("point", "worker"), in_turn(OF_CONNECTIONS, WORKERS))
def test_lost_connections_alone_cost_nothing(point: str, worker: str, undisturbed: str) -> None:
    outcome = run(f"{worker}:{point}@{1 if point.startswith('view') else 3}=lose")
    require_undisturbed(outcome, undisturbed)
    assert set(outcome.ended) == set(WORKERS)


@pytest.mark.parametrize("pairs", [SOME_PAIRS, ALL_PAIRS])
@pytest.mark.parametrize("point", ["view.formed", "result.taken", "view.agreed"])
def test_who_knows_of_a_commit_may_be_killed(point: str, pairs: list[tuple[str, str]], undisturbed: str) -> None:
    fired = []
    for late, worker in pairs:
        # The late worker loses its connections before it detects that the round was committed.
        outcome = run(f"{late}:round.voted@3=lose,{worker}:{point}@{1 if point in RARE else 2}=kill")
        require_undisturbed(outcome, undisturbed)
        fired += [worker] * (outcome.ended[worker] == -9)
    assert fired, f"{point} was never reached"


def test_a_worker_with_loader_processes_may_be_killed(undisturbed: str) -> None:
    outcome = run("0.1.0:round.computed@2=kill,0.2.0:round.voted@6=kill", num_workers=2)
    require_undisturbed(outcome, undisturbed)
    assert [outcome.ended[worker] for worker in WORKERS] == [0, -9, -9]
