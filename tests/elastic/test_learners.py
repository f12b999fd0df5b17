"""A late worker receives the state while the others train; the result is bitwise equal even if workers die."""

from __future__ import annotations

from collections.abc import Callable

import elastic_job
import elastic_programs
import pytest
from elastic_job import Outcome

from paceline.train.elastic.failpoints import POINTS_OF_CHILDREN, POINTS_OF_RECEIVERS, POINTS_OF_SENDERS
from paceline.train.elastic.protocol import CaughtUp, TransferReady, ViewInstalled

EPOCHS = 8
BALLAST_MIB = 9  # three chunks
DONORS = ("0.0.0", "0.2.0")
RECEIVER = "0.1.1"
DEATH = "0.1.0:round.computed@2=kill"  # death of the worker that the receiver replaces


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Returns the digest of an undisturbed run with a single worker."""
    outcome = elastic_job.run(elastic_programs.train, EPOCHS, elastic_programs.SHARDS, 0.0, 0, BALLAST_MIB, workers=1)
    (digest,) = outcome.results.values()
    assert isinstance(digest, str)
    return digest


def run(
    *failpoints: str,
    workers: int = 3,
    waits: bool = True,
    program: Callable[..., object] = elastic_programs.train,
    first: tuple[str, ...] = (),
    **rest: object,
) -> Outcome:
    outcome = elastic_job.run(
        program,
        *first,
        EPOCHS,
        elastic_programs.SHARDS,
        0.0,
        0,
        BALLAST_MIB,
        0.015,
        workers if waits else 0,
        workers=workers,
        failpoints=",".join([DEATH, *failpoints]),
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
        timeout_s=60.0,
        **rest,
    )
    assert outcome.code == 0, outcome
    assert outcome.errors == {}
    assert outcome.ended["0.1.0"] == -9
    return outcome


def said(outcome: Outcome, kind: type, worker: str | None = None) -> list[object]:
    return [what for _, who, what in outcome.heard if isinstance(what, kind) and worker in (None, who)]


def test_a_learner_catches_up_and_takes_part(undisturbed: str) -> None:
    outcome = run()
    assert {*outcome.results.values()} == {undisturbed}
    assert set(outcome.results) == {*DONORS, RECEIVER}
    first, second = said(outcome, TransferReady)
    assert first.round == second.round, "the snapshots are of the same state"
    assert said(outcome, CaughtUp, RECEIVER)
    (entered,) = said(outcome, ViewInstalled, RECEIVER)
    assert entered.round > first.round, "the others have gone on meanwhile"


# The suite uses one sender for each failpoint, in turn.
DONOR_POINTS = [
    pytest.param(point, donor, marks=[pytest.mark.soak] if (at + number) % 2 else [])
    for at, point in enumerate([*POINTS_OF_SENDERS, *POINTS_OF_CHILDREN])
    for number, donor in enumerate(DONORS)
]


@pytest.mark.parametrize(("point", "donor"), DONOR_POINTS)
def test_a_donor_may_be_killed_at_any_point(point: str, donor: str, undisturbed: str) -> None:
    outcome = run(f"{donor}:{point}@1=kill")
    assert {*outcome.results.values()} == {undisturbed}, outcome
    if point in POINTS_OF_SENDERS:
        assert outcome.ended[donor] == -9, f"{point} was never reached"


def test_both_donors_may_be_killed(undisturbed: str) -> None:
    outcome = run("0.0.0:join.logged@2=kill", "0.2.0:join.logged@3=kill", workers=4)
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert outcome.ended["0.0.0"] == -9


@pytest.mark.parametrize("point", POINTS_OF_RECEIVERS)
def test_a_learner_may_be_killed_at_any_point(point: str, undisturbed: str) -> None:
    outcome = run(f"{RECEIVER}:{point}@1=kill")
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert outcome.ended[RECEIVER] == -9, f"{point} was never reached"


@pytest.mark.parametrize("point", ["view.forming", "view.entering", "view.formed", "view.agreed"])
def test_a_learner_may_be_killed_when_it_comes_in(point: str, undisturbed: str) -> None:
    outcome = run(f"{RECEIVER}:{point}@1=kill")
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert outcome.ended[RECEIVER] == -9, f"{point} was never reached"


@pytest.mark.parametrize("point", ["view.entering", "view.formed"])
def test_a_learner_that_is_left_out_goes_on_learning(point: str, undisturbed: str) -> None:
    outcome = run(f"{RECEIVER}:{point}@1=lose")
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert outcome.ended[RECEIVER] == 0
    assert said(outcome, ViewInstalled, RECEIVER)


@pytest.mark.parametrize("late", ["", "0.0.0:view.agreed@2=delay"])
def test_a_learner_is_not_the_first_rank(late: str) -> None:
    """A learner has the last rank, even if its transfer begins in the batch in which a worker died."""
    failpoints = ",".join(filter(None, [DEATH, late]))
    outcome = elastic_job.run(elastic_programs.look_around, 60, failpoints=failpoints, policy={"gather_s": 0.02})
    assert outcome.code == 0, outcome
    seen = outcome.results[RECEIVER]
    assert isinstance(seen, list)
    replayed = [each for each in seen if each[0]]
    assert {tuple(each) for each in replayed} == {(True, 2, 3, False)}
    assert {tuple(each) for each in seen[len(replayed) :]} == {(False, 1, 3, True)}


def test_the_others_train_on_while_a_newcomer_connects(undisturbed: str) -> None:
    outcome = run(program=elastic_programs.train_with_a_slow_newcomer, first=(RECEIVER,))
    waits = {worker: result[1] for worker, result in outcome.results.items()}
    assert waits == {DONORS[0]: [], DONORS[1]: [], RECEIVER: [True]}, "the newcomer waited once, and not in vain"
    assert {result[0] for result in outcome.results.values()} == {undisturbed}


def test_a_member_may_die_while_another_learns(undisturbed: str) -> None:
    outcome = run(f"{RECEIVER}:join.chunk@1=delay", "0.3.0:round.computed@9=kill", workers=4)
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert said(outcome, ViewInstalled, RECEIVER)


def test_the_job_may_end_while_a_worker_learns(undisturbed: str) -> None:
    outcome = run(f"{RECEIVER}:join.chunk@1=stop", waits=False)
    assert {*outcome.results.values()} == {undisturbed}, outcome
    assert not said(outcome, ViewInstalled, RECEIVER)
