"""The address at which a machine serves the rendezvous, its local client, and the descriptors for many workers."""

from __future__ import annotations

import resource
import select
import socket

import pytest

from paceline.operate.launch.multinode import node_connection
from paceline.operate.launch.multinode.membership import Orders
from paceline.operate.launch.multinode.protocol import NodeStopped, Report, Stop
from paceline.operate.launch.workers.worker import allow_descriptors


@pytest.mark.parametrize(
    ("name", "leads_to", "served_on"),
    [
        ("10.0.0.1", None, "10.0.0.1"),
        ("fd00::1", None, "fd00::1"),
        ("localhost", None, "localhost"),
        ("node0", ["10.0.0.1"], "node0"),
        ("node0", ["127.0.1.1"], "192.168.0.9"),
        ("node0", [], "192.168.0.9"),
    ],
)
def test_a_loopback_name_is_served_on_the_address_others_see(monkeypatch, name, leads_to, served_on):
    def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not leads_to:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, 0)) for address in leads_to]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(node_connection, "own_address", lambda: "192.168.0.9")
    assert node_connection.host_to_serve_on(name, True) == served_on
    assert node_connection.host_to_serve_on(name, False) == (None if leads_to == [] else served_on)


def test_the_own_address_is_one_of_this_machine():
    with socket.create_server((node_connection.own_address(), 0)):
        pass


def test_descriptors_are_allowed_for_many_workers():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert allow_descriptors(1) is None
        assert allow_descriptors(100) == (min(512, before[1]), before[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1056, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Restarting:
    """A controller with orders at every report and tick."""

    deadline_s = None

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        return [(node, Stop(1, "first")), (node, Stop(1, "second"))]

    def tick(self, now_s: float) -> Orders:
        return [("local", Stop(1, "due"))]


def test_a_local_client_is_readable_only_while_there_are_orders():
    client = node_connection.LocalClient(Restarting())
    for _ in range(3):
        client.send(NodeStopped("SIGTERM"))
        assert select.select([client], [], [], 0)[0] == [client]
        assert [order.reason for order in client.receive()] == ["first", "second", "due"]
        assert [order.reason for order in client.receive()] == ["due"]
        assert select.select([client], [], [], 0)[0] == [], "the launcher's event loop would never wait"
    client.close()
    client.close()
    client.send(NodeStopped("SIGTERM"))
