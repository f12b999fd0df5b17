"""A launcher that is starved of CPU time is not considered lost."""

from __future__ import annotations

import socket
import sys

import pytest
from launching import wait_until

from paceline.operate.launch.multinode import remote_client
from paceline.operate.launch.multinode.protocol import JobEnded
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import STARVATION_LIMIT_S, is_starved


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with mine, theirs:
            yield mine


def test_what_a_machine_acknowledges_shows_that_it_is_there(connection):
    connection.sendall(b"beat")  # never read by the other end
    wait_until(lambda: is_starved(connection, 3.0, 0.0))


def test_patience_with_a_silent_launcher_ends(connection):
    assert not is_starved(connection, STARVATION_LIMIT_S, 60.0)


class Kernel:
    """A connection for which the kernel returns these values in `struct tcp_info` of linux/tcp.h."""

    def __init__(self, repeated: int, last_answer_ms: int) -> None:
        self._info = bytes([1, 0, repeated, *[0] * 53]) + last_answer_ms.to_bytes(4, sys.byteorder)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self._info[:nbytes]


@pytest.mark.parametrize(
    ("repeated", "last_ms", "is_there"), [(0, 5000, True), (1, 5000, True), (3, 900, True), (3, 1500, False)]
)
def test_a_machine_that_acknowledges_nothing_is_lost(repeated, last_ms, is_there):
    assert is_starved(Kernel(repeated, last_ms), 2.0, 1.0) is is_there


def test_a_closed_connection_leads_to_nobody(connection):
    connection.close()
    assert not is_starved(connection, 2.0, 1.0)


class Mute:
    """A server that performs its part of the handshake and then sends nothing."""

    deadline_s = None

    def reported(self, node, report, now_s):
        return []

    def ended(self, node, why, now_s):
        return []

    def lost(self, node, why, now_s, silent_s=0.0):
        return []

    def tick(self, now_s):
        return []


def test_a_silent_rendezvous_is_lost_once_its_machine_is(monkeypatch):
    from paceline.operate.launch.multinode import server as serving

    asked = []

    def answers(connection, silent_s, within_s) -> bool:
        asked.append(silent_s)
        return len(asked) < 3

    monkeypatch.setattr(serving, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(remote_client, "is_starved", answers)
    server = serving.RendezvousServer(socket.create_server(("127.0.0.1", 0)), None, Mute(), 60.0)
    client = connect_client(server.address, None, 60.0, 0.1, print)
    try:
        told = []
        wait_until(lambda: told.extend(client.receive()) or told)
        assert len(asked) == 3 and asked == sorted(asked)
        assert isinstance(told[0], JobEnded) and "was lost: nothing was received from it for" in told[0].reason
    finally:
        client.close()
        server.close(0.0)
