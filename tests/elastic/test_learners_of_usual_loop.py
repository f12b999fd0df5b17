"""In the usual loop, a late worker replays the steps of the training workers, some of which die in the meantime."""

from __future__ import annotations

import functools
from typing import Any

import elastic_job
import elastic_usual
import pytest
from elastic_job import Outcome
from elastic_usual import SAMPLES

from paceline.train.elastic.failpoints import POINTS_OF_CHILDREN, POINTS_OF_RECEIVERS, POINTS_OF_SENDERS
from paceline.train.elastic.protocol import CaughtUp, TransferReady, ViewInstalled, WorkerReady

EPOCHS = 8
RECEIVER = "0.1.1"
DEATH = "0.1.0:round.computed@2=kill"  # death of the worker that the receiver replaces


def run(*failpoints: str, workers: int = 3, **options: object) -> Outcome:
    settings = {"adapts": True, "centers": True, "complete": workers, **options}
    outcome = elastic_job.run(
        functools.partial(elastic_usual.train, EPOCHS, 0.003, **settings),
        workers=workers,
        failpoints=",".join([DEATH, *failpoints]),
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
    )
    assert outcome.code == 0, outcome
    assert outcome.errors == {}, outcome
    assert outcome.ended["0.1.0"] == -9
    return outcome


def require_whole(outcome: Outcome) -> dict[str, Any]:
    """Asserts that all workers have the same state at the end, and that each epoch has used each sample once."""
    first, *others = outcome.results.values()
    assert isinstance(first, dict)
    assert all(each == first for each in others), outcome.results
    used = [index for step in first["shares"] for index in step]
    assert len(used) == EPOCHS * SAMPLES
    for at in range(0, len(used), SAMPLES):
        assert sorted(used[at : at + SAMPLES]) == list(range(SAMPLES))
    return first


def said(outcome: Outcome, kind: type, worker: str) -> list[Any]:
    return [what for _, who, what in outcome.heard if isinstance(what, kind) and who == worker]


def gave_up_learning(outcome: Outcome, worker: str = RECEIVER) -> bool:
    return any(not each.can_catch_up for each in said(outcome, WorkerReady, worker))


@pytest.mark.parametrize("adapts", [True, False])
def test_a_learner_follows_the_others_and_takes_part(adapts: bool) -> None:
    outcome = run(adapts=adapts)
    result = require_whole(outcome)
    assert set(outcome.results) == {"0.0.0", "0.2.0", RECEIVER}
    (donated,) = said(outcome, TransferReady, "0.0.0")
    assert said(outcome, CaughtUp, RECEIVER)
    (entered,) = said(outcome, ViewInstalled, RECEIVER)
    assert entered.round > donated.round, "the others have gone on meanwhile"
    assert not gave_up_learning(outcome)
    assert [name for _, names, _ in result["views"][1:] for name in names] == [RECEIVER]


@pytest.mark.parametrize("point", [*POINTS_OF_SENDERS, *POINTS_OF_CHILDREN])
def test_a_donor_of_the_usual_loop_may_be_killed(point: str) -> None:
    outcome = run(f"0.0.0:{point}@1=kill")
    require_whole(outcome)
    if point in POINTS_OF_SENDERS:
        assert outcome.ended["0.0.0"] == -9, f"{point} was never reached"


def test_both_donors_of_the_usual_loop_may_be_killed() -> None:
    outcome = run("0.0.0:join.logged@2=kill", "0.2.0:join.logged@3=kill", workers=4)
    require_whole(outcome)
    assert outcome.ended["0.0.0"] == outcome.ended["0.2.0"] == -9


@pytest.mark.parametrize("point", [*POINTS_OF_RECEIVERS, "view.formed", "state.loaded", "view.agreed"])
def test_a_learner_of_the_usual_loop_may_be_killed(point: str) -> None:
    outcome = run(f"{RECEIVER}:{point}@1=kill")
    require_whole(outcome)
    assert outcome.ended[RECEIVER] == -9, f"{point} was never reached"


@pytest.mark.parametrize("point", ["view.formed", "state.loaded", "view.agreed"])
def test_one_that_is_left_out_goes_on_following(point: str) -> None:
    outcome = run(f"{RECEIVER}:{point}@1=lose")
    require_whole(outcome)
    assert outcome.ended[RECEIVER] == 0
    assert said(outcome, ViewInstalled, RECEIVER)
    assert not gave_up_learning(outcome)


@pytest.mark.parametrize("meddles", ["clamp", "closure"])
def test_steps_that_cannot_be_followed_are_noticed(meddles: str) -> None:
    outcome = run(meddles=meddles)
    require_whole(outcome)
    if meddles == "closure":  # with "clamp", the change might not be detected until the receiver enters the view
        assert gave_up_learning(outcome)
    assert set(outcome.results) == {"0.0.0", "0.2.0", RECEIVER}
    assert said(outcome, ViewInstalled, RECEIVER), "it was given the whole state"


def test_a_member_of_the_usual_loop_may_die_meanwhile() -> None:
    outcome = run(f"{RECEIVER}:join.chunk@1=delay", "0.3.0:round.computed@9=kill", workers=4)
    require_whole(outcome)
    assert said(outcome, ViewInstalled, RECEIVER)
