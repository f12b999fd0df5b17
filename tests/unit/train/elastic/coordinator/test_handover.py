"""The handover by a coordinator whose launcher is about to exit, event by event."""

from __future__ import annotations

from paceline.operate.launch.elastic.machine_log import MachineState
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.coordinator.election import (
    ALONE_S,
    ConnectionLoss,
    ContactResult,
    CoordinatorSearch,
    JobDeserted,
    Pause,
    StopSearch,
    TryMachine,
)
from paceline.train.elastic.protocol import (
    CaughtUp,
    CoordinatorOrder,
    HandoverOrder,
    LauncherAddress,
    LeaveNotice,
    LoopFinished,
    MachineReport,
    ReplicatedJobState,
    ReplicateOrder,
    SendOrder,
    StateTransfer,
    TransferOffer,
    TransferReady,
    View,
    ViewInstalled,
    WorkerReady,
    WorkerReport,
    merge_job_states,
    next_term,
)

POLICY = CoordinatorPolicy(max_machines=3, return_patience_s=2.0)


def running(machines: int = 3) -> tuple[Coordinator, View]:
    """Returns a job with a worker on each machine; machine 0 coordinates, and each machine serves a store."""
    coordinator = Coordinator(POLICY, 0.0, home="0", store="0")
    names = [str(number) for number in range(machines)]
    for name in names:
        coordinator.machine_joined(name, f"host-{name}", 1, 0.0, f"there:{name}", name)
        coordinator.machine_listed(name, 0.0)
    for name in names:
        coordinator.worker_started(f"{name}.0.0", name, 0.0)
    orders = [
        order for name in names for order in coordinator.handle_worker_message(f"{name}.0.0", WorkerReady("same"), 0.0)
    ]
    view = views(orders)[0]
    for uid in view.members:
        coordinator.handle_worker_message(uid, ViewInstalled(view.generation, 0), 0.0)
    return coordinator, view


def views(orders: list[CoordinatorOrder]) -> list[View]:
    return [each.message for each in orders if isinstance(each, SendOrder) and isinstance(each.message, View)]


def handed(orders: list[CoordinatorOrder]) -> list[tuple[str, int]]:
    return [(each.machine, each.to) for each in orders if isinstance(each, HandoverOrder)]


def retiring() -> tuple[Coordinator, View]:
    """Returns a job whose coordinating launcher received a SIGTERM; all workers have a view without its worker."""
    coordinator, _ = running()
    coordinator.slots_changed("0", 0, 1.0)
    coordinator.machine_leaves("0", 1.0)
    orders = coordinator.handle_worker_message("0.0.0", LeaveNotice("SIGTERM"), 1.0)
    (view,) = {each.generation: each for each in views(orders)}.values()
    return coordinator, view


def told() -> Coordinator:
    """Returns the same job after the successor has been notified."""
    coordinator, view = retiring()
    coordinator.worker_ended("0.0.0", "exit code 0", 0, 1.1)
    for uid in view.members:
        coordinator.handle_worker_message(uid, ViewInstalled(view.generation, 1), 1.2)
    return coordinator


def test_the_view_without_its_worker_meets_at_the_successor():
    _, view = retiring()
    assert (view.members, view.is_planned, view.store) == (("1.0.0", "2.0.0"), True, "1")


def test_the_successor_is_told_when_all_is_at_rest():
    coordinator, view = retiring()
    assert not handed(coordinator.handle_worker_message("1.0.0", ViewInstalled(view.generation, 1), 1.1))
    assert not handed(coordinator.handle_worker_message("2.0.0", ViewInstalled(view.generation, 1), 1.1))
    orders = coordinator.worker_ended("0.0.0", "exit code 0", 0, 1.2)
    assert handed(orders) == [("1", 1)]
    known = [each.job_state for each in orders if isinstance(each, ReplicateOrder)]
    assert {each.ended for each in known} == {(0,)} and {peer.number for peer in known[0].peers} == {1, 2}
    assert isinstance(orders[-1], HandoverOrder), "it knows all before"


def test_the_others_are_told_when_the_successor_stands():
    coordinator = told()
    assert not coordinator.tick(1.5)
    assert handed(coordinator.machine_lost("1", "it follows another", 1.6)) == [("2", 1), ("0", 1)]
    assert coordinator.retirement is not None and coordinator.retirement.is_over
    assert not coordinator.tick(99.0) and coordinator.deadline_s is None


def test_a_successor_that_is_slow_does_not_hold_it_up():
    coordinator = told()
    assert coordinator.deadline_s is not None
    assert handed(coordinator.tick(coordinator.deadline_s)) == [("1", 1), ("2", 1), ("0", 1)]


def test_one_that_has_resigned_decides_nothing_any_more():
    coordinator = told()
    assert coordinator.worker_ended("2.0.0", "killed by SIGKILL", -9, 1.3) == []


def test_a_machine_that_leaves_itself_is_no_successor():
    coordinator, _ = running()
    coordinator.machine_leaves("1", 0.5)
    coordinator.machine_leaves("0", 1.0)
    orders = coordinator.handle_worker_message("0.0.0", LeaveNotice("SIGTERM"), 1.0)
    assert views(orders)[0].store == "2"


def test_members_move_to_another_store_though_nobody_leaves():
    coordinator, _ = running()
    coordinator.worker_ended("0.0.0", "killed by SIGKILL", -9, 1.0)
    view = views(coordinator.handle_worker_message("1.0.0", ViewInstalled(1, 0), 1.0))
    assert not view, "the one that follows the death is told already"
    latest = coordinator._job.views.latest
    assert latest is not None and latest.store == "0"
    for uid in latest.members:
        coordinator.handle_worker_message(uid, ViewInstalled(latest.generation, 1), 1.1)
    moved = views(coordinator.machine_leaves("0", 1.2))[0]
    assert (moved.members, moved.is_planned, moved.store) == (latest.members, True, "1")


def test_when_all_leave_nobody_is_told_to_coordinate():
    coordinator, view = running(2)
    for name in "10":
        coordinator.machine_leaves(name, 1.0)
        coordinator.handle_worker_message(f"{name}.0.0", LeaveNotice("SIGTERM"), 1.0)
    orders = [order for uid in view.members for order in coordinator.worker_ended(uid, "exit code 0", 0, 1.1)]
    assert not handed(orders)


def test_a_launcher_tries_the_successor_first():
    seeker = CoordinatorSearch(2, 120.0, lambda: 0.0)
    seeker.handed_over(1, 0.0)
    assert not seeker.has_lost and seeker.next([1, 2], 0.0) == TryMachine(1)
    seeker.tried(1, ContactResult.ENDED)
    assert seeker.next([1, 2], 0.1) == TryMachine(1) and seeker.has_lost, "it looks on as after a loss"
    assert seeker.next([1, 2], 0.1) == TryMachine(2, 0.6)


def test_the_successor_stands():
    seeker = CoordinatorSearch(1, 120.0, lambda: 0.0)
    seeker.handed_over(1, 0.0)
    assert seeker.next([1, 2], 0.0) == TryMachine(1, 0.6)


def asks(
    seeker: CoordinatorSearch, answers: dict[int, ContactResult], until_s: float, *, is_done: bool = False
) -> object:
    """Simulates a launcher's search for a coordinator with these responses; returns the last step of the search."""
    now_s, step = 0.0, None
    while now_s < until_s and not isinstance(step, (JobDeserted, StopSearch)):
        step = seeker.next([seeker.me, *answers], now_s, is_done=is_done)
        if isinstance(step, TryMachine):
            seeker.tried(step.number, answers.get(step.number, ContactResult.SEEKING))
        now_s += step.for_s if isinstance(step, Pause) else 0.01
    return step


def test_a_machine_learns_that_the_job_is_over():
    ended = dict.fromkeys((0, 1), ContactResult.ENDED)
    for answers, is_over in ((ended, True), ({**ended, 1: ContactResult.SILENT}, False), ({}, False)):
        seeker = CoordinatorSearch(2, 120.0, lambda: 0.0)
        seeker.lost(0, ConnectionLoss.SILENT, 0.0)
        assert isinstance(asks(seeker, answers, 2 * ALONE_S), JobDeserted) == is_over


def test_a_machine_whose_workers_have_finished_does_not_wait():
    for is_done in (True, False):
        seeker = CoordinatorSearch(2, 120.0, lambda: 0.0)
        seeker.lost(0, ConnectionLoss.SILENT, 0.0)
        step = asks(seeker, {0: ContactResult.SILENT}, 2 * ALONE_S, is_done=is_done)
        assert isinstance(step, JobDeserted) == is_done


def test_an_account_says_whether_its_workers_have_finished():
    account = MachineState("host-1", 2)
    for uid in ("1.0.0", "1.1.0"):
        account.started(uid)
        account.record_message(uid, LoopFinished(9))
    assert account.has_finished and not account.is_done
    account.ended("1.0.0", "exit code 0", 0)
    account.ended("1.1.0", "killed by SIGKILL", -9)
    assert account.is_done
    account.started("1.1.1")
    account.record_message("1.1.1", LoopFinished(9))
    account.ended("1.1.1", "exit code 3", 3)
    assert not account.has_finished


FIRST = View((1 << 32) + 1, ("0.0.0", "1.0.0"), is_planned=False, store="0")

TRANSFER = StateTransfer(FIRST.generation + 1, "2.0.0", FIRST.members)

PEERS = tuple(LauncherAddress(number, f"host-{number}", f"there:{number}") for number in range(3))

KNOWN = ReplicatedJobState(1, 0, "same", FIRST.generation, (FIRST,), peers=PEERS, transfers=(TRANSFER,))


def teaching(*said: object, known: ReplicatedJobState = KNOWN) -> tuple[Coordinator, list[CoordinatorOrder]]:
    """Machine 1 takes over while worker 2.0.0 receives the state from 0.0.0 and 1.0.0 and has reported progress."""
    reports = []
    for number in range(3):
        heard = said if number == 2 else (WorkerReady("same"), ViewInstalled(FIRST.generation, 0))
        donates = () if number == 2 else (TransferReady(TRANSFER.number, 4, f"there:{number}"),)
        workers = (WorkerReport(f"{number}.0.0", (*heard, *donates)),)
        reports.append(MachineReport(number, f"host-{number}", 1, number, known, workers))
    coordinator = Coordinator(POLICY, 0.0, next_term(1, 1), home="1", store="1")
    return coordinator, coordinator.resume(reports[::-1], 0.0)


def transfers(orders: list[CoordinatorOrder]) -> set[int]:
    return {
        each.message.number
        for each in orders
        if isinstance(each, SendOrder) and isinstance(each.message, StateTransfer)
    }


def test_a_lesson_goes_on_under_another_coordinator():
    coordinator, orders = teaching(WorkerReady("same", can_catch_up=True))
    assert transfers(orders) == {TRANSFER.number}, "no other is begun"
    offers = [each.message for each in orders if isinstance(each, SendOrder) and each.uid == "2.0.0"]
    assert {each.sender for each in offers if isinstance(each, TransferOffer)} == {*FIRST.members}
    view = views(coordinator.handle_worker_message("2.0.0", CaughtUp(5), 0.1))[0]
    assert view.is_planned and view.members == ("0.0.0", "1.0.0", "2.0.0")


def test_a_learner_that_had_caught_up_comes_in():
    _, orders = teaching(WorkerReady("same", can_catch_up=True), CaughtUp(5))
    assert views(orders)[-1].members == ("0.0.0", "1.0.0", "2.0.0")


def test_a_lesson_that_came_to_nothing_is_followed_by_another():
    _, orders = teaching(WorkerReady("same", can_catch_up=True, after=TRANSFER.number))
    assert transfers(orders) - {TRANSFER.number}


def test_what_is_known_of_lessons_is_short():
    later = StateTransfer(TRANSFER.number + 5, "2.0.0", ("1.0.0",))
    other = StateTransfer(TRANSFER.number + 1, "1.0.0", ("0.0.0",))
    known = merge_job_states([KNOWN, ReplicatedJobState(1, 0, transfers=(later, other))])
    assert known.transfers == (later,), "the receiver's last, and not that of a member"
