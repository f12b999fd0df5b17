"""The transition between coordinators of an elastic job; test_election_schedules.py has random schedules."""

from __future__ import annotations

import msgspec
from successor_coordinators import FIRST, KNOWN, report, running, views

from paceline.operate.launch.elastic.machine_log import MachineState
from paceline.train.elastic.coordinator.election import (
    Candidacy,
    ConnectionLoss,
    ContactResult,
    CoordinatorSearch,
    Pause,
    StopSearch,
    TryMachine,
)
from paceline.train.elastic.protocol import (
    EndOrder,
    LoopFinished,
    View,
    WorkerReady,
    WorkerReport,
)


def test_the_lowest_machine_stands_and_the_others_follow():
    seekers = [CoordinatorSearch(number, 120.0, lambda: 0.0) for number in range(3)]
    for seeker in seekers[1:]:
        seeker.lost(0, ConnectionLoss.SILENT, 0.0)
        assert seeker.next([0, 1, 2], 0.0) == TryMachine(0)
        seeker.tried(0, ContactResult.SILENT)
    assert seekers[1].next([0, 1, 2], 0.1) == TryMachine(1, 0.6)
    assert seekers[2].next([0, 1, 2], 0.1) == TryMachine(1)


def test_one_that_others_have_not_missed_yet_is_waited_for():
    seeker = CoordinatorSearch(2, 120.0, lambda: 0.0)
    seeker.lost(0, ConnectionLoss.ENDED, 0.0)
    assert seeker.next([0, 1, 2], 0.0) == TryMachine(0)
    assert seeker.tried(0, ContactResult.ENDED), "no process listens there any more"
    assert seeker.next([1, 2], 0.0) == TryMachine(1)
    seeker.tried(1, ContactResult.ELSEWHERE, 0)
    assert seeker.next([1, 2], 0.0) == Pause(0.1)
    assert [seeker.next([1, 2], 1.5) for _ in range(2)] == [TryMachine(1), TryMachine(2, 0.6)]
    assert isinstance(seeker.next([1, 2], 120.0), StopSearch)


def test_only_an_orderly_end_that_is_confirmed_counts_as_one():
    confirmed = {
        (loss, answer): _lost_and_tried(loss, answer)
        for loss in ConnectionLoss
        for answer in (ContactResult.ENDED, ContactResult.SILENT)
    }
    assert {pair for pair, counts in confirmed.items() if counts} == {
        (ConnectionLoss.ENDED, ContactResult.ENDED),
        (ConnectionLoss.ENDED, ContactResult.SILENT),
        (ConnectionLoss.RESET, ContactResult.ENDED),
    }


def _lost_and_tried(loss: ConnectionLoss, answer: ContactResult) -> bool:
    seeker = CoordinatorSearch(1, 120.0, lambda: 0.0)
    seeker.lost(0, loss, 0.0)
    return seeker.tried(0, answer)


def test_a_candidate_needs_a_quorum_and_waits_for_the_rest():
    candidacy = Candidacy(0.0, 1.0)
    candidacy.follows(report(2), 0.0)
    assert not candidacy.has_enough and candidacy.deadline_s == 1.0
    candidacy.follows(report(1), 0.1)
    assert candidacy.has_enough and not candidacy.is_elected(0.2), "machine 0 may be on its way"
    assert candidacy.is_elected(0.5)
    candidacy.follows(report(0), 0.2)
    assert candidacy.is_elected(0.2)
    candidacy.left(1, 0.2)
    candidacy.left(0, 0.2)
    assert not candidacy.is_elected(9.0)


def test_an_account_is_told_in_full():
    account = MachineState("host-1", 2, 1, 2)
    for uid in ("1.2.0", "1.3.0"):
        account.started(uid)
    account.record_message("1.2.0", WorkerReady("same"))
    account.stalled("1.2.0", "stopped")
    account.ended("1.3.0", "exit code 1", 1)
    account.merge(KNOWN)
    later = replace_generation(FIRST, 1)
    account.passes_on(later)
    account.machine_ended(0)
    told = account.report()
    assert told.workers == (WorkerReport("1.2.0", (WorkerReady("same"),), "stopped"),)
    assert told.ended == (("1.3.0", "exit code 1", 1),)
    assert told.job_state.views == (FIRST, later) and told.job_state.ended == (0,)
    assert told.job_state.coordinator == 0 and told.job_state.is_dead("0.0.0")


def replace_generation(view: View, more: int) -> View:
    return msgspec.structs.replace(view, generation=view.generation + more, previous=view.generation)


def test_a_machine_is_given_time_since_it_was_heard_of_last():
    for silent_s, left_out_s in ((0.0, 2.0), (1.5, 0.5)):
        coordinator, _ = running(m0=2, m1=1)
        assert views(coordinator.machine_lost("1", "reset", 0.0, silent_s)) == []
        assert views(coordinator.tick(left_out_s))[0].members == ("0.0.0", "0.1.0")


def test_a_loop_that_ended_out_of_reach_counts():
    coordinator, _ = running(m0=1, m1=1)
    coordinator.machine_lost("1", "silence", 0.0)
    coordinator.handle_worker_message("0.0.0", LoopFinished(3), 0.1)
    coordinator.worker_ended("0.0.0", "exit code -9", -9, 0.2)
    back = report(1, workers=(), ended=(("1.0.0", "exit code 0", 0),), finished=("1.0.0",))
    assert EndOrder(0) in coordinator.machine_returned(back, 1.0)
