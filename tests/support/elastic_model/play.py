"""A coordinator that processes scripted events, and the messages that each worker has received."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.operate.launch.elastic.machine_log import ReplayableMessages
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.protocol import (
    CoordinatorOrders,
    EndOrder,
    FromWorker,
    SendOrder,
    View,
    ViewInstalled,
    WorkerReady,
)


@dataclass
class Play:
    """A scripted job. A worker's name consists of its machine's name and a digit: `a0`, `b1`."""

    policy: CoordinatorPolicy = field(default_factory=lambda: CoordinatorPolicy(max_machines=3))
    now_s: float = 0.0
    orders: CoordinatorOrders = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.policy, 0.0)

    def take(self, orders: CoordinatorOrders) -> None:
        self.orders += orders

    def machines(self, **slots: int) -> None:
        for name, count in slots.items():
            self.take(self.coordinator.machine_joined(name, f"host-{name}", count, self.now_s))
            self.take(self.coordinator.machine_listed(name, self.now_s))

    def ready(self, *uids: str, fingerprint: str = "same") -> None:
        for uid in uids:
            self.take(self.coordinator.worker_started(uid, uid[0], self.now_s))
            self.say(uid, WorkerReady(fingerprint))

    def say(self, uid: str, message: FromWorker) -> None:
        self.take(self.coordinator.handle_worker_message(uid, message, self.now_s))

    def install(self, view: View, *uids: str, round_: int = 0) -> None:
        for uid in uids or view.members:
            self.say(uid, ViewInstalled(view.generation, round_))

    def kill(self, *uids: str, code: int = -9) -> None:
        for uid in uids:
            self.take(self.coordinator.worker_ended(uid, f"exit code {code}", code, self.now_s))

    def lose(self, machine: str) -> None:
        self.take(self.coordinator.machine_lost(machine, "silence", self.now_s))

    def come_back(self, machine: str, **standings: ReplayableMessages) -> None:
        self.take(self.coordinator.machine_joined(machine, f"host-{machine}", len(standings), self.now_s))
        for uid, standing in standings.items():
            self.take(self.coordinator.worker_started(uid, machine, self.now_s, standing.messages))
        self.take(self.coordinator.machine_listed(machine, self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.coordinator.tick(self.now_s))

    def told(self, uid: str) -> list[object]:
        return [order.message for order in self.orders if isinstance(order, SendOrder) and order.uid == uid]

    def view(self) -> View:
        """Returns the last view that was announced, after checking that all its members received it."""
        view = next(order.message for order in reversed(self.orders) if isinstance(order, SendOrder) and is_view(order))
        assert isinstance(view, View)
        assert all(view in self.told(uid) for uid in view.members)
        return view

    def end(self) -> EndOrder:
        last = self.orders[-1]
        assert isinstance(last, EndOrder), last
        return last


def is_view(order: SendOrder) -> bool:
    return isinstance(order.message, View)


def running(*uids: str, **rest: object) -> Play:
    """Returns a job whose first view these workers have entered."""
    play = Play(CoordinatorPolicy(max_machines=3, **rest))
    slots: dict[str, int] = {}
    for uid in uids:
        slots[uid[0]] = slots.get(uid[0], 0) + 1
    play.machines(**slots)
    play.ready(*uids)
    play.install(play.view())
    return play
