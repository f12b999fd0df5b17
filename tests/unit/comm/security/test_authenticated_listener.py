"""Unauthenticated connections are closed in time, and many of them do not block other clients."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from gates import open_gate
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_until
from simulated_training import Training

from paceline.comm.one_port.dialer import PASSED_ON, header_for
from paceline.comm.one_port.port_multiplexer import MAX_PENDING_CLIENTS, listen_at_number
from paceline.comm.security.authenticated_listener import MAX_HANDSHAKES, AuthenticatedListener
from paceline.comm.security.handshake import PeerHello, prove, warn_of_running_job
from paceline.comm.security.secret import derive_key
from paceline.comm.security.untrusted_peers import PendingConnections, origin_of_connection
from paceline.comm.store import remote_store
from paceline.comm.store.tcp_store import StoreServer, TCPStore
from paceline.operate.dashboard.access import Access
from paceline.operate.dashboard.server import ListenAddress

DEADLINE_S = 60.0
TOKEN = "0123456789abcdef" * 2
SOMEBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")

FLOOD = """
import encodings.idna, os, socket, sys
os.setgid({user}); os.setuid({user})
held = []
for number in range({count}):
    connection = socket.create_connection(("127.0.0.1", {port}))
    if number % 2:
        connection.send({beginning!r})
    held.append(connection)
print("held", flush=True)
sys.stdin.read()
"""


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


@contextmanager
def flooded(port: int, count: int, beginning: bytes) -> Iterator[None]:
    """Opens many connections as another user; half of them send nothing."""
    code = FLOOD.format(user=SOMEBODY, count=count, port=port, beginning=beginning)
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 8))
def test_the_oldest_of_the_most_frequent_origin_makes_room(origins, most):
    pending: PendingConnections[tuple[int, str]] = PendingConnections(most, lambda each: each[1])
    kept: list[tuple[int, str]] = []
    for each in enumerate(origins):
        kept.append(each)
        ended = pending.add(each)
        if len(kept) > most:
            largest = max(sum(whose == other for _, other in kept) for _, whose in kept)
            expected = next(one for one in kept if sum(one[1] == other for _, other in kept) == largest)
            kept.remove(expected)
            assert ended == expected
        else:
            assert ended is None
        assert list(pending) == kept and len(pending) <= most


@pytest.mark.parametrize("level", ["auth", "encrypt"])
def test_a_running_job_with_another_secret_is_reported(monkeypatch, level):
    monkeypatch.setenv("PACELINE_SECURITY", level)
    monkeypatch.setattr("paceline.comm.security.handshake.is_between_machines", lambda _: True)
    listener, hosts = socket.create_server(("127.0.0.1", 0)), list[str]()
    with contextlib.closing(AuthenticatedListener(listener, b"key", "node", fail, on_foreign_job=hosts.append)) as door:
        with connected(door.port) as connection:
            warn_of_running_job(connection)
        wait_until(lambda: hosts == ["127.0.0.1"])


def fail(*_: object) -> None:
    raise AssertionError


def test_a_connection_that_proves_itself_takes_no_place():
    pending: PendingConnections[int] = PendingConnections(2, lambda _: "one")
    assert [pending.add(number) for number in (1, 2)] == [None, None]
    assert pending.remove(1) and not pending.remove(1)
    assert pending.add(3) is None and pending.add(4) == 2


@only_root
def test_the_kernel_tells_whose_a_connection_is():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as v6,
    ):
        for each in (listener, v6):
            with socket.create_connection(each.getsockname()[:2]) as ours:
                accepted, _ = each.accept()
                with accepted:
                    assert origin_of_connection(accepted) == f"user {os.getuid()}"
                assert ours.fileno() >= 0
        with flooded(listener.getsockname()[1], 1, b""):
            accepted, _ = listener.accept()
            with accepted:
                assert origin_of_connection(accepted) == f"user {SOMEBODY}"
    left, right = socket.socketpair()
    with left, right:
        assert origin_of_connection(left) == ""


def request(path: str) -> bytes:
    """Returns a request from the page's own user."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


def ask_page(port: int) -> bytes:
    """Returns the status of the page's response, or an empty one if the connection was closed."""
    with connected(port) as connection:
        connection.sendall(request("/picture.json"))
        try:
            return connection.recv(12)
        except ConnectionError:
            return b""


@contextmanager
def page() -> Iterator[int]:
    pytest.importorskip("uvicorn")
    from paceline.operate.dashboard.server import DashboardServer

    training = Training(2)
    training.run(3.0)
    listener = ListenAddress().listen()
    complaints: list[str] = []
    serving = DashboardServer(listener, training.look, Access(TOKEN, "job"), complain=complaints.append)
    try:
        yield listener.getsockname()[1]
    finally:
        serving.close()
    assert complaints == []


@only_root
@pytest.mark.parametrize(
    "beginning", [b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_another_user_cannot_keep_the_owner_from_the_page(beginning):
    with page() as port, flooded(port, 600, beginning), connected(port) as slow:
        slow.sendall(b"GET /picture.json HTTP/1.1\r\nHost: localhost\r\n")
        assert ask_page(port) == b"HTTP/1.1 200"
        with flooded(port, 200, beginning):  # the slow connection is now the oldest
            slow.sendall(f"Authorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert slow.recv(12) == b"HTTP/1.1 200"


def test_the_owner_may_have_many_pages_open():
    with page() as port, contextlib.ExitStack() as streams:
        for _ in range(100):  # more than the permitted number of connections without a token
            stream = streams.enter_context(connected(port))
            stream.sendall(request("/events"))
            assert stream.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /actions/stacks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nx",
    ],
    ids=["silent", "half a header", "half a body"],
)
def test_a_connection_that_does_not_show_the_token_ends_in_time(monkeypatch, beginning):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("paceline.operate.dashboard.application.ENTRANCE_S", 0.5)
    with page() as port, connected(port) as connection:
        connection.sendall(beginning)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):  # the connection is rejected, or closed without a response
                pass
        assert ask_page(port) == b"HTTP/1.1 200"


def test_a_connection_that_has_shown_the_token_stays(monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("paceline.operate.dashboard.application.ENTRANCE_S", 0.3)
    with page() as port, connected(port) as stream:
        stream.sendall(request("/events"))
        with connected(port) as silent, contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        received = b""
        while b"event:" not in received and b"data:" not in received:
            received += stream.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200")


@only_root
def test_another_user_cannot_keep_a_client_from_the_store(no_secret):
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    server = StoreServer(listener, None)
    try:
        with connected(port) as early:  # the oldest connection
            with flooded(port, 3 * MAX_HANDSHAKES, b"p"):
                store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S))
                store.set("key", b"value")
                assert store.get("key") == b"value"
                store.close()
            prove(early, derive_key(None, remote_store.CHANNEL), PeerHello(remote_store.CHANNEL))
    finally:
        server.close()


@only_root
def test_another_user_cannot_keep_a_machine_from_the_gate(monkeypatch, no_secret):
    with (
        open_gate(monkeypatch) as port,
        contextlib.closing(listen_at_number("127.0.0.1", 0, port)) as listener,
        connected(port) as early,  # the oldest connection
        flooded(port, 3 * MAX_PENDING_CLIENTS, b"paceln"),
    ):
        early.sendall(header_for(listener.getsockname()[1]))
        assert early.recv(1) == PASSED_ON
        accepted, _ = listener.accept()
        accepted.close()
