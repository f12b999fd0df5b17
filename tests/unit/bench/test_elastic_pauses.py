"""`bench/elastic.py` evaluates the records of jobs whose workers were killed."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))  # after `tests`, because both have a module `hosts`

from elastic_cases import timeline
from elastic_cases.churn import Kill
from elastic_cases.pauses import Figures, distribution
from elastic_cases.stranger import _steps_within
from elastic_cases.timeline import Commit

MS = 1_000_000


def commits(slot: int, pid: int, times_ms: dict[int, int]) -> list[Commit]:
    """Returns the records of a process: the steps and times of its commits."""
    return [Commit(slot, pid, step, at_ms * MS) for step, at_ms in times_ms.items()]


def figures_of(*notes: Commit, kill: Kill, steps: int) -> Figures:
    figures = Figures()
    figures.add(sorted(notes, key=lambda note: note.at_ns), [kill], 2, steps)
    return figures


def test_the_pause_ends_before_the_replacements_step() -> None:
    survivor = commits(0, 10, {1: 10, 2: 20, 3: 130, 4: 140, 5: 150, 6: 210, 7: 220, 8: 230})
    dead = commits(1, 11, {1: 10, 2: 20})
    replacement = commits(1, 12, {6: 210, 7: 220, 8: 230})
    figures = figures_of(*survivor, *dead, *replacement, kill=Kill(1, 11, 25 * MS), steps=8)
    assert figures.steps == [10.0]
    assert figures.at_death == [110.0 - 10.0]
    assert figures.at_entry == [60.0 - 10.0]
    assert figures.back == [130.0 - 25.0]
    assert figures.joined == [210.0 - 25.0]
    assert (figures.lost, figures.redone, figures.restarted) == (0, 0, 0)


def test_the_processor_time_of_a_replacement_is_a_share() -> None:
    figures = Figures()
    notes = [*commits(0, 10, {1: 10, 2: 20, 3: 60, 4: 100}), *commits(1, 11, {1: 10}), *commits(1, 12, {3: 60, 4: 100})]
    figures.add(sorted(notes, key=lambda note: note.at_ns), [Kill(1, 11, 20 * MS)], 2, 4, {12: 0.03})
    assert figures.shares == [pytest.approx(0.75)], "30 ms of 40"


def test_the_longest_step_of_a_lesson_is_counted() -> None:
    survivor = commits(0, 10, {1: 10, 2: 20, 3: 400, 4: 410, 5: 475, 6: 485, 7: 545, 8: 555, 9: 565})
    figures = figures_of(*survivor, *commits(1, 12, {7: 545, 8: 555}), kill=Kill(1, 11, 25 * MS), steps=9)
    assert figures.at_lesson == [65.0 - 10.0], "neither the step of the kill nor that of the entry"


def test_steps_beside_a_stranger_are_whole() -> None:
    notes = [*commits(0, 10, {1: 10, 2: 25, 3: 45}), *commits(1, 11, {1: 12, 2: 30})]
    assert [*_steps_within(notes, [(5 * MS, 28 * MS), (44 * MS, 60 * MS)])] == [15 * MS]


def test_steps_that_all_do_again_are_counted_once() -> None:
    first = [note for slot in (0, 1) for note in commits(slot, 10 + slot, {1: 10, 2: 20, 3: 30})]
    again = [note for slot in (0, 1) for note in commits(slot, 20 + slot, {2: 530, 3: 540, 4: 550})]
    figures = figures_of(*first, *again, kill=Kill(1, 11, 35 * MS), steps=5)
    assert figures.redone == 2
    assert figures.lost == 1, "nobody has committed step 5"
    assert figures.restarted == 1, "the worker of slot 0 was not killed"
    assert figures.at_death == [500.0 - 10.0]
    assert figures.back == [550.0 - 35.0], "steps 2 and 3 had been committed before"


def test_a_death_may_come_before_the_job_is_back() -> None:
    first = [note for slot in (0, 1) for note in commits(slot, 10 + slot, {1: 10, 2: 20, 3: 30})]
    second = [note for slot in (0, 1) for note in commits(slot, 20 + slot, {2: 530})]
    third = [note for slot in (0, 1) for note in commits(slot, 30 + slot, {2: 930, 3: 940, 4: 950})]
    figures = Figures()
    figures.add([*first, *second, *third], [Kill(1, 11, 35 * MS), Kill(1, 21, 535 * MS)], 2, 4)
    assert figures.back == [950.0 - 35.0, 950.0 - 535.0]
    assert figures.at_death == [500.0 - 10.0, 400.0 - 10.0]
    assert (figures.redone, figures.restarted) == (3, 2)


def test_a_replacement_that_comes_too_late_is_no_arrival() -> None:
    survivor = commits(0, 10, {1: 10, 2: 20, 3: 130, 4: 140})
    figures = figures_of(*survivor, *commits(1, 11, {1: 10}), kill=Kill(1, 11, 15 * MS), steps=4)
    assert figures.joined == [] == figures.at_entry
    assert figures.at_death == [110.0 - 10.0]


def test_notes_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    recorder = timeline.Recorder(str(tmp_path), 3)
    recorder.committed(1)
    recorder.given_up(2)
    recorder.committed(2)
    with open(next(tmp_path.iterdir()), "ab") as file:
        file.write(b"part of a note")
    notes = timeline.read(tmp_path)
    assert [(note.slot, note.pid, note.step) for note in notes] == [(3, os.getpid(), step) for step in (1, -2, 2)]
    assert timeline.latest(tmp_path) == [notes[-1]]


def test_distributions_of_few_times_have_all_columns() -> None:
    assert distribution([5.0], "pause") == {"pause n": 1, "pause p50 ms": 5.0, "pause p99 ms": 5.0, "pause max ms": 5.0}
    assert distribution([]) == {"n": 0, "p50 ms": None, "p99 ms": None, "max ms": None}
    assert distribution([float(each) for each in range(101)])["p99 ms"] == pytest.approx(99.0)
