"""The views that a coordinator reissues or takes over, and their members."""

from __future__ import annotations

import msgspec
from successor_coordinators import FIRST, KNOWN, PEERS, POLICY, report, running, views

from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.election import (
    merge_reports,
)
from paceline.train.elastic.protocol import (
    CoordinatorOrder,
    ExitRequest,
    FenceStalledOrder,
    MachineReport,
    NotifyOrder,
    ReplicatedJobState,
    ReplicateOrder,
    SendOrder,
    View,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
    merge_job_states,
    next_term,
)


def resumed(*reports: MachineReport) -> tuple[Coordinator, list[CoordinatorOrder]]:
    coordinator = Coordinator(POLICY, 0.0, next_term(1, 1), home="1", store="1")
    return coordinator, coordinator.resume(reports, 0.0)


def fenced(orders: list[CoordinatorOrder]) -> list[str]:
    return [each.uid for each in orders if isinstance(each, FenceStalledOrder)]


def test_all_machines_know_of_a_view_before_any_worker_does():
    coordinator, _ = running(m0=2, m1=1)
    orders = coordinator.worker_ended("0.1.0", "killed", -9, 0.0)
    kinds = [type(each) for each in orders if not isinstance(each, NotifyOrder)]
    assert kinds == [ReplicateOrder, ReplicateOrder, SendOrder, SendOrder]


def test_a_minority_is_told_its_view_once_the_others_know_it():
    coordinator, first = running(m0=1, m1=2)
    coordinator.worker_stalled("1.0.0", "stopped", 0.0)
    orders = coordinator.worker_stalled("1.1.0", "stopped", 0.0)
    generation = max(each.job_state.views[-1].generation for each in orders if isinstance(each, ReplicateOrder))
    assert generation > first.generation and not views(orders)
    assert not views(coordinator.machine_replicated("0", generation, 0.0))
    assert views(coordinator.machine_replicated("1", generation, 0.0))[0].members == ("0.0.0",)


def test_the_stopped_are_killed_when_others_know_the_view():
    coordinator, _ = running(m0=1, m1=2)
    assert fenced(coordinator.worker_stalled("1.0.0", "stopped", 0.0)) == ["1.0.0"], "a majority is in the view"
    orders = coordinator.worker_stalled("1.1.0", "stopped", 0.0)
    generation = max(each.job_state.views[-1].generation for each in orders if isinstance(each, ReplicateOrder))
    assert not fenced(orders) and not fenced(coordinator.machine_replicated("0", generation, 0.0))
    assert fenced(coordinator.machine_replicated("1", generation, 0.0)) == ["1.1.0"]


def test_a_new_coordinator_leaves_a_view_alone_that_all_are_in():
    coordinator, orders = resumed(report(0), report(1), report(2))
    assert {each.generation for each in views(orders)} == {FIRST.generation}
    assert "machine 1 coordinates from now on" in next(each.text for each in orders if isinstance(each, NotifyOrder))
    assert coordinator.deadline_s is None


def test_a_new_coordinator_goes_on_without_a_dead_machine():
    known = msgspec.structs.replace(KNOWN, ended=(0,))
    _, orders = resumed(report(1, known=known), report(2))
    assert views(orders)[-1].members == ("1.0.0", "2.0.0") and views(orders)[-1].store == "1"


def test_a_machine_has_time_to_follow_the_new_coordinator():
    coordinator, orders = resumed(report(1), report(2))
    assert {each.generation for each in views(orders)} == {FIRST.generation}
    assert views(coordinator.tick(0.4)) == []
    assert views(coordinator.tick(0.5))[0].members == ("1.0.0", "2.0.0")


def test_broken_connections_end_the_wait_for_a_machine():
    coordinator, _ = resumed(report(1), report(2))
    orders = coordinator.handle_worker_message("1.0.0", ViewFailed(FIRST.generation, 1, "lost 0.0.0"), 0.1)
    assert views(orders)[0].members == ("1.0.0", "2.0.0")


def test_members_meet_again_where_the_new_coordinator_serves():
    second = View(FIRST.generation + 1, FIRST.members, is_planned=False, store="0", previous=FIRST.generation)
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    _, orders = resumed(report(0), report(1, known=known), report(2))
    assert views(orders)[-1].members == FIRST.members and views(orders)[-1].store == "1"


def test_who_was_left_out_stays_out():
    second = View(FIRST.generation + 1, ("0.0.0", "1.0.0"), is_planned=False, store="0", previous=FIRST.generation)
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    _, orders = resumed(report(0), report(1, known=known), report(2))
    assert views(orders)[-1].members == ("0.0.0", "1.0.0")


def test_one_member_that_has_entered_speaks_for_all():
    second = View(FIRST.generation + 1, FIRST.members, is_planned=True, store="0", previous=FIRST.generation)
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    said = (WorkerReady("same"), ViewInstalled(second.generation, 3))
    assert merge_reports([report(0), report(1, said, known)]).complete == second.generation


def test_a_worker_taken_for_dead_is_told_to_end():
    coordinator, _ = running(m0=2, m1=1)
    coordinator.machine_left("1", "its launcher has ended", 0.0)
    orders = coordinator.machine_returned(report(1), 1.0)
    assert ExitRequest("the others have continued without it") in [
        each.message for each in orders if isinstance(each, SendOrder)
    ]


def test_a_coordinator_resigns_for_a_later_one():
    coordinator, _ = resumed(report(1), report(2))
    later = ReplicatedJobState(next_term(next_term(1, 0), 0), 0, views=(), peers=PEERS)
    (order,) = coordinator.machine_returned(report(0, known=later), 1.0)
    assert isinstance(order, NotifyOrder) and "has followed machine 0" in order.text
    assert coordinator.resigns_s == 1.0 and coordinator.tick(2.0) == []


def test_a_void_view_is_dropped():
    complete = View(FIRST.generation + 2, ("1.0.0", "2.0.0"), is_planned=False, previous=FIRST.generation)
    next_view = View(FIRST.generation + 3, FIRST.members, is_planned=True, previous=complete.generation)
    void = View((next_term(1, 0) << 32) + 1, ("0.0.0", "1.0.0"), is_planned=False, previous=FIRST.generation)
    states = [
        msgspec.structs.replace(KNOWN, term=next_term(1, 0), views=(FIRST, void)),
        msgspec.structs.replace(KNOWN, complete=complete.generation, views=(complete, next_view)),
    ]
    assert merge_job_states(states).views == merge_job_states(states[::-1]).views == (complete, next_view)
    assert merge_job_states(states[:1]).views == (FIRST, void)
