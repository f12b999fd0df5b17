"""The transition between coordinators of an elastic job, event by event; random schedules are in test_failover.py."""

from __future__ import annotations

import msgspec

from paceline.operate.launch.elastic.machine_log import MachineState
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.coordinator.election import (
    Candidacy,
    ConnectionLoss,
    ContactResult,
    CoordinatorSearch,
    GiveUp,
    Pause,
    TryMachine,
    merge_reports,
)
from paceline.train.elastic.protocol import (
    Broken,
    CoordinatorOrder,
    Dismissed,
    FenceStalledOrder,
    Installed,
    LauncherAddress,
    MachineReport,
    NotifyOrder,
    Ready,
    ReplicatedJobState,
    ReplicateOrder,
    SendOrder,
    View,
    WorkerReport,
    merge_job_states,
    next_term,
)

POLICY = CoordinatorPolicy(max_machines=3, return_patience_s=2.0)
FIRST = View((1 << 32) + 1, ("0.0.0", "1.0.0", "2.0.0"), is_planned=False, store="0")
PEERS = tuple(LauncherAddress(number, f"host-{number}", f"there:{number}") for number in range(3))
KNOWN = ReplicatedJobState(1, 0, "same", FIRST.generation, (FIRST,), peers=PEERS)
IN_FIRST = (Ready("same"), Installed(FIRST.generation, 0))


def report(number: int, said: tuple = IN_FIRST, known: ReplicatedJobState = KNOWN, **rest: object) -> MachineReport:
    workers = (WorkerReport(f"{number}.0.0", said),)
    return MachineReport(number, f"host-{number}", 1, number, known, **{"workers": workers, **rest})


def resumed(*reports: MachineReport) -> tuple[Coordinator, list[CoordinatorOrder]]:
    coordinator = Coordinator(POLICY, 0.0, next_term(1, 1), home="1", store="1")
    return coordinator, coordinator.resume(reports, 0.0)


def views(orders: list[CoordinatorOrder]) -> list[View]:
    return [each.message for each in orders if isinstance(each, SendOrder) and isinstance(each.message, View)]


def fenced(orders: list[CoordinatorOrder]) -> list[str]:
    return [each.uid for each in orders if isinstance(each, FenceStalledOrder)]


def running(**slots: int) -> tuple[Coordinator, View]:
    """Returns a job on machines `m0`, `m1`, ..., all of which have entered the view."""
    coordinator = Coordinator(POLICY, 0.0, home="0", store="0")
    orders: list[CoordinatorOrder] = []
    for name in slots:
        coordinator.machine_joined(name[1:], f"host-{name[1:]}", slots[name], 0.0, "there")
        coordinator.machine_listed(name[1:], 0.0)
    uids = [f"{name[1:]}.{slot}.0" for name in slots for slot in range(slots[name])]
    for uid in uids:
        coordinator.worker_started(uid, uid[0], 0.0)
    for uid in uids:
        orders = coordinator.worker_said(uid, Ready("same"), 0.0)
    view = views(orders)[0]
    for uid in uids:
        coordinator.worker_said(uid, Installed(view.generation, 0), 0.0)
    return coordinator, view


def test_all_machines_know_of_a_view_before_any_worker_does():
    coordinator, _ = running(m0=2, m1=1)
    orders = coordinator.worker_ended("0.1.0", "killed", -9, 0.0)
    kinds = [type(each) for each in orders if not isinstance(each, NotifyOrder)]
    assert kinds == [ReplicateOrder, ReplicateOrder, SendOrder, SendOrder]


def test_a_minority_is_told_its_view_once_the_others_know_it():
    coordinator, first = running(m0=1, m1=2)
    coordinator.worker_stalled("1.0.0", "stopped", 0.0)
    orders = coordinator.worker_stalled("1.1.0", "stopped", 0.0)
    generation = max(each.knowledge.views[-1].generation for each in orders if isinstance(each, ReplicateOrder))
    assert generation > first.generation and not views(orders)
    assert not views(coordinator.machine_knows("0", generation, 0.0))
    assert views(coordinator.machine_knows("1", generation, 0.0))[0].members == ("0.0.0",)


def test_the_stopped_are_killed_when_others_know_the_view():
    coordinator, _ = running(m0=1, m1=2)
    assert fenced(coordinator.worker_stalled("1.0.0", "stopped", 0.0)) == ["1.0.0"], "a majority is in the view"
    orders = coordinator.worker_stalled("1.1.0", "stopped", 0.0)
    generation = max(each.knowledge.views[-1].generation for each in orders if isinstance(each, ReplicateOrder))
    assert not fenced(orders) and not fenced(coordinator.machine_knows("0", generation, 0.0))
    assert fenced(coordinator.machine_knows("1", generation, 0.0)) == ["1.1.0"]


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
    orders = coordinator.worker_said("1.0.0", Broken(FIRST.generation, 1, "lost 0.0.0"), 0.1)
    assert views(orders)[0].members == ("1.0.0", "2.0.0")


def test_members_meet_again_where_the_new_coordinator_serves():
    second = View(FIRST.generation + 1, FIRST.members, is_planned=False, store="0")
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    _, orders = resumed(report(0), report(1, known=known), report(2))
    assert views(orders)[-1].members == FIRST.members and views(orders)[-1].store == "1"


def test_who_was_left_out_stays_out():
    second = View(FIRST.generation + 1, ("0.0.0", "1.0.0"), is_planned=False, store="0")
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    _, orders = resumed(report(0), report(1, known=known), report(2))
    assert views(orders)[-1].members == ("0.0.0", "1.0.0")


def test_one_member_that_has_entered_speaks_for_all():
    second = View(FIRST.generation + 1, FIRST.members, is_planned=True, store="0")
    known = msgspec.structs.replace(KNOWN, views=(FIRST, second))
    said = (Ready("same"), Installed(second.generation, 3))
    assert merge_reports([report(0), report(1, said, known)]).complete == second.generation


def test_a_worker_taken_for_dead_is_told_to_end():
    coordinator, _ = running(m0=2, m1=1)
    coordinator.machine_left("1", "its launcher has ended", 0.0)
    orders = coordinator.machine_returned(report(1), 1.0)
    assert Dismissed("the others have continued without it") in [
        each.message for each in orders if isinstance(each, SendOrder)
    ]


def test_numbers_grow_beyond_what_a_returning_machine_has_heard():
    coordinator, orders = resumed(report(1), report(2))
    later = ReplicatedJobState(next_term(next_term(1, 0), 0), 0, views=(), peers=PEERS)
    orders = coordinator.machine_returned(report(0, known=later), 1.0)
    assert views(orders)[-1].generation >> 32 > later.term


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
    assert isinstance(seeker.next([1, 2], 120.0), GiveUp)


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
    account.said("1.2.0", Ready("same"))
    account.stalled("1.2.0", "stopped")
    account.ended("1.3.0", "exit code 1", 1)
    account.learns(KNOWN)
    later = replace_generation(FIRST, 1)
    account.passes_on(later)
    account.machine_ended(0)
    told = account.report()
    assert told.workers == (WorkerReport("1.2.0", (Ready("same"),), "stopped"),)
    assert told.ended == (("1.3.0", "exit code 1", 1),)
    assert told.knowledge.views == (FIRST, later) and told.knowledge.ended == (0,)
    assert told.knowledge.coordinator == 0 and told.knowledge.is_dead("0.0.0")


def replace_generation(view: View, more: int) -> View:
    return msgspec.structs.replace(view, generation=view.generation + more)


def test_knowledge_of_several_is_put_together():
    second = replace_generation(FIRST, 1)
    one = msgspec.structs.replace(KNOWN, dead=("2.0.0",))
    other = msgspec.structs.replace(KNOWN, complete=second.generation, views=(second,))
    known = merge_job_states([one, other])
    assert known.views == (second,) and known.complete == second.generation and known.dead == ("2.0.0",)
    assert merge_job_states([]) == ReplicatedJobState()


def test_no_two_machines_have_the_same_term():
    assert len({next_term(term, number) for term in (1, 65537) for number in range(3)}) == 6
    assert next_term(1, 0) > 1 and next_term(next_term(1, 2), 0) > next_term(1, 2)


def test_reports_and_knowledge_survive_the_wire():
    told = report(1, ended=(("1.0.1", "killed", -9),))
    assert msgspec.json.decode(msgspec.json.encode(told), type=MachineReport) == told


def test_a_machine_is_given_time_since_it_was_heard_of_last():
    for silent_s, left_out_s in ((0.0, 2.0), (1.5, 0.5)):
        coordinator, _ = running(m0=2, m1=1)
        assert views(coordinator.machine_lost("1", "reset", 0.0, silent_s)) == []
        assert views(coordinator.tick(left_out_s))[0].members == ("0.0.0", "0.1.0")
