"""Coordinators that take over an elastic job from another coordinator, and the reports of the job's machines."""

from __future__ import annotations

from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.protocol import (
    CoordinatorOrder,
    LauncherAddress,
    MachineReport,
    ReplicatedJobState,
    SendOrder,
    View,
    ViewInstalled,
    WorkerReady,
    WorkerReport,
)

POLICY = CoordinatorPolicy(max_machines=3, return_patience_s=2.0)

FIRST = View((1 << 32) + 1, ("0.0.0", "1.0.0", "2.0.0"), is_planned=False, store="0")

PEERS = tuple(LauncherAddress(number, f"host-{number}", f"there:{number}") for number in range(3))

KNOWN = ReplicatedJobState(1, 0, "same", FIRST.generation, (FIRST,), peers=PEERS)

IN_FIRST = (WorkerReady("same"), ViewInstalled(FIRST.generation, 0))


def report(number: int, said: tuple = IN_FIRST, known: ReplicatedJobState = KNOWN, **rest: object) -> MachineReport:
    workers = (WorkerReport(f"{number}.0.0", said),)
    return MachineReport(number, f"host-{number}", 1, number, known, **{"workers": workers, **rest})


def views(orders: list[CoordinatorOrder]) -> list[View]:
    return [each.message for each in orders if isinstance(each, SendOrder) and isinstance(each.message, View)]


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
        orders = coordinator.handle_worker_message(uid, WorkerReady("same"), 0.0)
    view = views(orders)[0]
    for uid in uids:
        coordinator.handle_worker_message(uid, ViewInstalled(view.generation, 0), 0.0)
    return coordinator, view
