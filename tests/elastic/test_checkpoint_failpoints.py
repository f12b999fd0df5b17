"""Kills workers of an elastic job during saves: the others continue, and the last checkpoint is complete."""

from __future__ import annotations

from pathlib import Path

import elastic_job
import elastic_programs
import elastic_usual
import pytest
from checkpoint_states import newest_whole

from paceline.train.checkpoint.format.root import Root
from paceline.train.elastic.failpoints import POINTS_OF_CHECKPOINTS

EPOCHS = 3
LAST_STEP = 12
# The suite uses a few operations; the nightly run uses every operation of the first two saves.
FEW = [("checkpoint.create", 2), ("checkpoint.sync", 3), ("checkpoint.rename", 1)]
ALL = [(point, count) for point in POINTS_OF_CHECKPOINTS for count in range(1, 12)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the digest of an undisturbed run with a single worker."""
    directory = str(tmp_path_factory.mktemp("undisturbed"))
    (digest,) = elastic_job.run(elastic_programs.train_and_save, EPOCHS, directory, True, workers=1).results.values()
    assert isinstance(digest, str)
    return digest


def die_in_a_save(
    directory: Path, failpoints: str, undisturbed: str, asynchronous: bool, steps: tuple[int, ...] = (LAST_STEP,)
) -> dict[str, int]:
    """Returns the workers' exit codes; asserts that the newest checkpoint is complete and from one of `steps`."""
    outcome = elastic_job.run(
        elastic_programs.train_and_save,
        EPOCHS,
        str(directory),
        asynchronous,
        failpoints=failpoints,
        policy={"gather_s": 0.02, "start_patience_s": 20.0},
    )
    assert (outcome.code, outcome.errors) == (0, {}), outcome
    assert {*outcome.results.values()} == {undisturbed}, outcome
    found, skipped = newest_whole(Root(directory), digests=True)
    assert found is not None and skipped == []
    assert found.step in steps
    return outcome.ended


@pytest.mark.parametrize(("point", "count"), FEW)
def test_a_worker_may_die_while_it_saves(tmp_path: Path, undisturbed: str, point: str, count: int) -> None:
    ended = die_in_a_save(tmp_path, f"0.0.0:{point}@{count}=kill", undisturbed, True)
    assert ended["0.0.0"] == -9


def train_as_usual(directory: Path, epochs: int, failpoints: str = "") -> elastic_job.Outcome:
    """Asserts that all workers end with the same state, and that each epoch has used each sample once."""
    policy = {"gather_s": 0.02, "start_patience_s": 20.0}
    outcome = elastic_job.run(
        elastic_usual.train_and_save, epochs, str(directory), failpoints=failpoints, policy=policy
    )
    assert (outcome.code, outcome.errors) == (0, {}), outcome
    assert len({str(result["digest"]) for result in outcome.results.values()}) == 1, outcome
    for result in outcome.results.values():
        used = [index for step in result["shares"] for index in step]
        assert len(used) == epochs * elastic_usual.SAMPLES
        for at in range(0, len(used), elastic_usual.SAMPLES):
            assert sorted(used[at : at + elastic_usual.SAMPLES]) == list(range(elastic_usual.SAMPLES))
    return outcome


@pytest.mark.parametrize("point", ["checkpoint.create", "checkpoint.rename"])
def test_a_worker_of_the_usual_loop_may_die_in_a_save(tmp_path: Path, point: str) -> None:
    ended = train_as_usual(tmp_path, 2, f"0.0.0:{point}@1=kill").ended
    assert ended["0.0.0"] == -9
    found, skipped = newest_whole(Root(tmp_path), digests=True)
    assert found is not None
    assert skipped == []
    later = train_as_usual(tmp_path, 3)
    assert {result["restored"] for result in later.results.values()} == {found.step}


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("point", "count"), ALL)
def test_any_worker_may_die_at_any_operation(
    tmp_path: Path, undisturbed: str, point: str, count: int, asynchronous: bool
) -> None:
    # Training has ended when the last step is saved, so no worker repeats this save if one dies.
    steps = (LAST_STEP - 3, LAST_STEP) if asynchronous else (LAST_STEP,)
    for worker in ("0.0.0", "0.2.0"):
        die_in_a_save(tmp_path / worker, f"{worker}:{point}@{count}=kill", undisturbed, asynchronous, steps)
    both = f"0.0.0:{point}@{count}=kill,0.1.0:{point}@{count}=kill"
    die_in_a_save(tmp_path / "both", both, undisturbed, asynchronous, steps)
