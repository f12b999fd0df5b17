"""A busy rendezvous server does not consider its nodes lost, and the nodes do not consider the server lost."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from launching import wait_until

from paceline.operate.launch.multinode import server as serving
from paceline.operate.launch.multinode.membership import Orders
from paceline.operate.launch.multinode.protocol import Heartbeat, WorkersFinished, WorkersStopped
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import RendezvousServer

SILENCE_S = 60.0  # on the test's clock, which runs ahead of the real one


@dataclass
class Thinker:
    """A controller that blocks while it processes a report of kind `WorkersStopped`, until it is released."""

    deadline_s = None
    thinks: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    reports: list[object] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)

    def reported(self, node: str, report: object, now_s: float) -> Orders:
        if isinstance(report, WorkersStopped):
            self.thinks.set()
            assert self.may_go_on.wait(60)
        self.reports.append(report)
        return []

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        return []

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        self.lost_nodes.append(why)
        return []

    def tick(self, now_s: float) -> Orders:
        return []


@pytest.fixture
def rendezvous(monkeypatch):
    monkeypatch.setattr(serving, "HEARTBEAT_S", 0.05)
    thinker = Thinker()
    server = RendezvousServer(socket.create_server(("127.0.0.1", 0)), None, thinker, SILENCE_S)
    clients = [connect_client(server.address, None, 60.0, SILENCE_S, print) for _ in range(2)]
    for client in clients:
        client.send(WorkersFinished(0))
    wait_until(lambda: thinker.reports.count(WorkersFinished(0)) == 2)
    yield thinker, clients
    thinker.may_go_on.set()
    for client in clients:
        client.close()
    server.close(0.0)


def test_a_server_that_thinks_gives_signs_of_life(rendezvous):
    thinker, clients = rendezvous
    clients[0].send(WorkersStopped(1, 2))
    assert thinker.thinks.wait(60)
    heard: list[object] = []

    def has_heard(client) -> bool:
        heard.extend(client.receive())
        return heard.count(Heartbeat()) > 10  # more than can have been in transit

    for client in clients:
        client.receive()
        heard.clear()
        wait_until(lambda client=client: has_heard(client))


def test_what_came_while_the_server_thought_was_no_silence(rendezvous, monkeypatch):
    thinker, (first, second) = rendezvous
    first.send(WorkersStopped(1, 2))
    assert thinker.thinks.wait(60)
    ahead = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * SILENCE_S, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(serving, "time", ahead)
    second.send(WorkersFinished(1))
    thinker.may_go_on.set()
    wait_until(lambda: WorkersFinished(1) in thinker.reports)
    assert thinker.lost_nodes == []


def test_a_server_that_hears_nobody_suspects_its_machine():
    me = socket.gethostname()
    cut_off = f", nor from any other machine: {me}, which hosts the rendezvous, may be the one that is cut off"
    assert serving.explain_silence(2.13, [2.13, 1.9], 2.0) == f"nothing was received from it for 2.1 s{cut_off}"
    assert serving.explain_silence(2.13, [2.13], 2.0) == f"nothing was received from it for 2.1 s{cut_off}"
    assert serving.explain_silence(2.13, [2.13, 0.2], 2.0) == "nothing was received from it for 2.1 s"
    assert serving.explain_silence(2.13, [], 2.0) == "nothing was received from it for 2.1 s", "all are on this machine"


def test_a_closed_server_is_woken_without_effect(tmp_path):
    server = RendezvousServer(socket.create_server(("127.0.0.1", 0)), None, Thinker(), SILENCE_S)
    server.close(0.0)
    files = [(tmp_path / str(number)).open("wb") for number in range(20)]  # they take the numbers of its descriptors
    server.wake()
    for file in files:
        assert os.fstat(file.fileno()).st_size == 0
        file.close()


def test_nobody_waits_for_a_server_that_is_woken_often(rendezvous):
    thinker, _ = rendezvous
    server = RendezvousServer(socket.create_server(("127.0.0.1", 0)), None, thinker, SILENCE_S)
    client = connect_client(server.address, None, 60.0, SILENCE_S, print)
    client.send(WorkersStopped(0, 0))
    assert thinker.thinks.wait(60)
    for _ in range(100_000):  # more than the kernel keeps for a reader that is busy
        server.wake()
    thinker.may_go_on.set()
    client.send(WorkersFinished(7))
    wait_until(lambda: WorkersFinished(7) in thinker.reports)
    client.close()
    server.close()
