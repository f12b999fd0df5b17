"""Announcements by a job's launchers to the rendezvous address, over sockets on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from launching import wait_until

import paceline
from paceline.comm.store.tcp_store import listen
from paceline.operate.launch.elastic import coordinator_client
from paceline.operate.launch.elastic.coordinator_client import RunningJobAnnouncer
from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic.standby_controller import StandbyController
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.multinode.membership import MembershipPolicy, Orders
from paceline.operate.launch.multinode.protocol import (
    FollowResponse,
    JobEnded,
    JobRunning,
    JoinJob,
    Order,
    Report,
)
from paceline.operate.launch.multinode.remote_client import connect, warn_of_running_job_at
from paceline.operate.launch.multinode.server import RendezvousServer
from paceline.train.elastic.protocol import NotifyOrder

SECRET = b"42" * 16
JOB = JobRunning("job", "10.0.0.1:29400")


class Called:
    """A launcher at the rendezvous address, which is machine 3 of `job`."""

    deadline_s = None

    def __init__(self, job: str) -> None:
        self.job, self.heard = job, list[Report]()

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        self.heard.append(report)
        return [(node, FollowResponse(False, 3))] if report == JOB and self.job == JOB.job else []

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        return []

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        return []

    def tick(self, now_s: float) -> Orders:
        return []


@pytest.fixture
def serving() -> Iterator[dict[str, RendezvousServer]]:
    servers: dict[str, RendezvousServer] = {}
    yield servers
    for server in servers.values():
        server.close(0.0)


def serve(serving: dict[str, RendezvousServer], called: Called) -> tuple[str, int]:
    server = serving[called.job] = RendezvousServer(listen("127.0.0.1", 0, SECRET), SECRET, called, 2.0)
    return server.address


def test_a_launcher_of_no_job_is_called_again_and_again(serving):
    called = Called("")
    caller = RunningJobAnnouncer(serve(serving, called), SECRET, lambda: JOB, lambda _: True)
    try:
        wait_until(lambda: called.heard == [JOB] * 2)
    finally:
        caller.close()


def test_a_launcher_of_the_job_is_called_once_while_it_is_there(serving):
    called, here = Called("job"), {3}
    asked: list[int] = []

    def is_here(number: int) -> bool:
        asked.append(number)
        return number in here

    caller = RunningJobAnnouncer(serve(serving, called), SECRET, lambda: JOB, is_here)
    try:
        wait_until(lambda: len(asked) >= 3)
        assert called.heard == [JOB] and {*asked} == {3}
        here.clear()
        wait_until(lambda: len(called.heard) >= 2)
    finally:
        caller.close()


def test_nobody_calls_while_there_is_nothing_to_tell(serving):
    called, asked = Called(""), list[int]()

    def nothing() -> None:
        asked.append(1)

    caller = RunningJobAnnouncer(serve(serving, called), SECRET, nothing, lambda _: False)
    try:
        wait_until(lambda: len(asked) >= 3)
    finally:
        caller.close()
    assert called.heard == []


def test_a_process_that_does_not_respond_delays_no_exit(monkeypatch):
    connecting, may_go_on, waited = threading.Event(), threading.Event(), list[bool]()

    def connects(*_: object) -> None:
        connecting.set()
        waited.append(may_go_on.wait(60))
        raise OSError

    monkeypatch.setattr(coordinator_client, "connect", connects)
    caller = RunningJobAnnouncer(("127.0.0.1", 1), SECRET, lambda: JOB, lambda _: False)
    assert connecting.wait(60)
    caller.close()
    may_go_on.set()
    wait_until(lambda: waited)
    assert waited == [True], "close() waited for the response"


def test_a_listener_with_another_secret_gets_no_message(serving):
    called = Called("")
    caller = RunningJobAnnouncer(serve(serving, called), b"17" * 16, lambda: JOB, lambda _: False)
    try:
        wait_until(lambda: caller._pause_s > 1)
    finally:
        caller.close()
    assert not any(isinstance(each, JobRunning | JoinJob) for each in called.heard)


class Beginning(StandbyController):
    """A launcher that has just been started at the rendezvous address, with its orders."""

    def __init__(self) -> None:
        policy = MembershipPolicy("job", 1, 2)
        super().__init__(policy, ElasticOptions(), ElasticController(policy, ElasticOptions(), time.monotonic()))
        self.ordered: list[Order] = []

    def tick(self, now_s: float) -> Orders:
        orders = super().tick(now_s)
        self.ordered += [order for _, order in orders]
        return orders


def test_a_launcher_with_another_secret_is_warned_and_not_ended(serving):
    begins = Beginning()
    server = serving["new"] = RendezvousServer(
        listen("127.0.0.1", 0, SECRET), SECRET, begins, 2.0, on_foreign_job=begins.warn_of_foreign_job
    )
    begins.wake = server.wake
    caller = RunningJobAnnouncer(server.address, b"17" * 16, lambda: JOB, lambda _: False)
    try:
        wait_until(lambda: caller._pause_s > 1)
        assert begins.ordered == [], "no launcher has connected that could print the reason"
        begins.reported("a", own_join(), time.monotonic())
        wait_until(lambda: begins.ordered)
        for _ in range(3):
            warn_of_running_job_at(server.address, 5.0)
    finally:
        caller.close()
    with closing(connect(server.address, SECRET, 5.0)):  # the earlier reports have been accepted
        wait_until(lambda: len(server._nodes) == 1)
    (warning,) = [order for order in begins.ordered if isinstance(order, NotifyOrder)]
    assert "127.0.0.1 reported that a job with another secret is running at this rendezvous address" in warning.text
    assert not any(isinstance(order, JobEnded) for order in begins.ordered)


def own_join() -> JoinJob:
    return JoinJob("h0", 1, "h0", 7, 1, version=paceline.__version__, is_elastic=True, serves=True)
