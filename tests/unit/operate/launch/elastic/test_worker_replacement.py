"""Decisions by an elastic job's launcher, without processes: replacements, chaos and its cost, and frozen workers."""

from __future__ import annotations

import signal

import pytest

from paceline.operate.launch.elastic.worker_replacement import (
    MOST_FAILED_STARTS,
    MOST_KILLED_STARTS,
    MOST_SOON,
    SOON_S,
    CloseSlot,
    ExitCause,
    ReplaceWorker,
    SlotHistory,
    SlotTable,
    WorkerHistory,
    exit_cause_of,
    pause_s,
)
from paceline.train.elastic.protocol import LEFT_OUT

KILLED, FAILED = ExitCause.KILLED, ExitCause.FAILED


def part(since_s: float = 0.0, **rest: object) -> WorkerHistory:
    return WorkerHistory(took_part_s=since_s, **rest)


@pytest.mark.parametrize(
    ("life", "code", "record", "memory", "fate"),
    [
        (part(), 1, True, False, ExitCause.FAILED),
        (part(), 3, False, False, ExitCause.FAILED),
        (part(), -signal.SIGSEGV, False, False, ExitCause.FAILED),
        (part(), -signal.SIGKILL, False, True, ExitCause.FAILED),
        (part(), -signal.SIGKILL, False, False, ExitCause.KILLED),
        (part(), -signal.SIGINT, False, False, ExitCause.KILLED),
        (part(is_fenced=True), -signal.SIGKILL, False, True, ExitCause.KILLED),
        (part(), -signal.SIGTERM, False, False, ExitCause.LEFT),
        (part(is_leaving=True), 0, False, False, ExitCause.LEFT),
        (part(is_leaving=True), -signal.SIGKILL, False, False, ExitCause.LEFT),
        (part(has_finished=True), 0, False, False, ExitCause.DONE),
        (part(has_finished=True), 1, True, False, ExitCause.FAILED),
        (WorkerHistory(), 0, False, False, ExitCause.DONE),
        (part(dismissed=0), 0, False, False, ExitCause.RELEASED),
        (part(), LEFT_OUT, False, False, ExitCause.RELEASED),
        (part(dismissed=2), 2, False, False, ExitCause.REFUSED),
    ],
)
def test_the_fate_of_a_worker(life, code, record, memory, fate):
    assert exit_cause_of(life, code, record, memory) is fate


def follow(slot: SlotHistory, *ends: tuple[ExitCause, WorkerHistory, float]) -> list[ReplaceWorker | CloseSlot]:
    return [slot.ended(*end) for end in ends]


def test_a_worker_killed_after_taking_part_is_always_replaced():
    assert follow(SlotHistory(), *[(KILLED, part(t), t + 0.1) for t in range(1000)]) == [ReplaceWorker(0.0)] * 1000


def test_a_script_that_fails_at_its_start_is_given_up():
    decisions = follow(SlotHistory(), *[(FAILED, WorkerHistory(), t) for t in range(MOST_FAILED_STARTS)])
    assert decisions[:-1] == [ReplaceWorker(0.0), ReplaceWorker(0.25), ReplaceWorker(0.5)]
    assert decisions[-1] == CloseSlot("4 of its workers in a row failed before they joined")


def test_a_worker_killed_at_its_start_is_not_replaced_for_ever():
    decisions = follow(SlotHistory(), *[(KILLED, WorkerHistory(), t) for t in range(MOST_KILLED_STARTS)])
    assert all(isinstance(each, ReplaceWorker) for each in decisions[:-1])
    assert decisions[-1] == CloseSlot("10 of its workers in a row were killed before they joined")


def test_taking_part_forgives_failed_starts():
    slot = SlotHistory()
    follow(slot, *[(FAILED, WorkerHistory(), 0.0)] * (MOST_FAILED_STARTS - 1), (KILLED, part(1.0), 2.0))
    assert follow(slot, (FAILED, WorkerHistory(), 3.0)) == [ReplaceWorker(0.0)]


def test_failures_soon_after_taking_part_count():
    decisions = follow(SlotHistory(), *[(FAILED, part(t), t + SOON_S - 1) for t in (0.0, 100.0, 200.0)])
    assert decisions[:2] == [ReplaceWorker(0.0), ReplaceWorker(0.25)]
    assert decisions[2] == CloseSlot(f"{MOST_SOON} of its workers in a row failed within 60 s of joining")


def test_a_worker_that_failed_late_forgives_earlier_ones():
    times = [(0.0, 1.0), (10.0, 11.0), (20.0, 20.0 + SOON_S), (100.0, 101.0), (110.0, 111.0)]
    decisions = follow(SlotHistory(), *[(FAILED, part(begun_s), ended_s) for begun_s, ended_s in times])
    assert decisions == [
        ReplaceWorker(0.0),
        ReplaceWorker(0.25),
        ReplaceWorker(0.0),
        ReplaceWorker(0.0),
        ReplaceWorker(0.25),
    ]


def test_those_that_are_done_or_left_are_not_replaced():
    assert follow(SlotHistory(), (ExitCause.DONE, part(), 1.0), (ExitCause.LEFT, part(), 1.0)) == [CloseSlot(None)] * 2
    (refused,) = follow(SlotHistory(), (ExitCause.REFUSED, WorkerHistory(), 1.0))
    assert isinstance(refused, CloseSlot) and refused.reason is not None


def test_what_follows_the_loop_is_not_done_again():
    (decision,) = follow(SlotHistory(), (KILLED, part(has_finished=True), 1.0))
    assert decision == CloseSlot("it had finished its loop, and the code after the loop cannot be repeated")


def test_pauses_double_up_to_the_longest():
    assert [pause_s(n) for n in range(1, 6)] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert pause_s(50) == pause_s(5000) == 30.0


def test_places_are_due_at_once_and_then_after_their_pauses():
    places = SlotTable(2, 10.0)
    assert places.deadline_s == 10.0
    assert places.due(10.0) == [0, 1] and places.due(10.0) == []
    places.ended(1, FAILED, WorkerHistory(), 11.0)
    assert places.due(11.0) == [1]
    places.ended(1, FAILED, WorkerHistory(), 12.0)
    assert places.due(12.2) == [] and places.deadline_s == 12.25
    assert places.due(12.25) == [1] and places.count == 2


def test_the_bound_on_replacements_is_that_of_all_slots():
    places = SlotTable(2, 0.0, most_replacements=1)
    places.due(0.0)
    assert places.ended(0, KILLED, part(), 1.0) == ReplaceWorker(0.0)
    assert places.ended(1, KILLED, part(), 1.0) == CloseSlot(
        "--max-restarts 1 allows no further replacement on this machine"
    )
    assert places.count == 1 and places.due(1.0) == [0]


def test_closed_places_are_filled_no_more():
    places = SlotTable(3, 0.0)
    places.due(0.0)
    places.ended(2, FAILED, WorkerHistory(), 1.0)
    places.close({0, 1})
    assert places.count == 2 and places.due(100.0) == [] and places.deadline_s is None
    assert places.ended(0, KILLED, part(), 2.0) == CloseSlot("workers are no longer replaced")
    assert places.ended(2, KILLED, part(), 2.0) == CloseSlot(None)
