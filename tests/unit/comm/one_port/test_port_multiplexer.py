"""One port for all services of a machine: the choice of the port, and a gate on loopback."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import socket
import threading
from collections.abc import Iterator

import pytest
from gates import DEADLINE_S, HERE, open_gate
from launching import wait_until
from world import reserved_port

from paceline.comm.one_port import dialer, port_multiplexer
from paceline.comm.one_port.dialer import header_for
from paceline.comm.one_port.port_multiplexer import (
    MAX_PENDING_CLIENTS,
    NumberedListener,
    PortMultiplexer,
    listen_at_number,
    random_name,
)
from paceline.comm.security.authenticated_listener import AuthenticatedListener
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import PeerGoneError, PeerHello, prove
from paceline.comm.security.secret import derive_key
from paceline.comm.store.tcp_store import PortInUseError, StoreServer, TCPStore, listen
from paceline.errors import AuthenticationError, StoreConnectionError

KEY = derive_key(b"s" * 32, "links")


# The choice of the port


@pytest.mark.parametrize("text", ["0", "65536", "-1", "http", "29500 "])
def test_a_wrong_port_is_refused(monkeypatch, text):
    monkeypatch.setenv("PACELINE_PORT", text)
    with pytest.raises(ValueError, match="must be a port from 1 to 65535"):
        dialer.chosen_port()


def test_two_different_ports_are_refused(monkeypatch):
    monkeypatch.setenv("PACELINE_PORT", "29500")
    dialer.choose_port(29500)
    with pytest.raises(ValueError, match="29501 here and 29500 in PACELINE_PORT"):
        dialer.choose_port(29501)


def test_loopback_does_without_the_port(monkeypatch):
    monkeypatch.setenv("PACELINE_PORT", "29500")
    with contextlib.closing(listen("localhost", 0, None)) as listening:
        assert isinstance(listening, socket.socket)
        dialer.dial(("localhost", listening.getsockname()[1]), DEADLINE_S).close()


# A gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with open_gate(monkeypatch) as port:
        yield port


def _reach(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection((HERE, port), DEADLINE_S)
    connection.sendall(data)
    return connection


def _is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_comes_to_the_holder_of_its_number(gate):
    held = [listen_at_number(HERE, 0, gate) for _ in range(3)]
    for at, listening in enumerate(held):
        with dialer.dial(listening.getsockname(), DEADLINE_S) as connection:
            accepted, address = listening.accept()
            with accepted:
                assert address == connection.getsockname() == accepted.getpeername()
                assert accepted.getsockname() == (HERE, gate)
                connection.sendall(b"to %d" % at)
                assert accepted.recv(10) == b"to %d" % at
                accepted.sendall(b"back")
                assert connection.recv(10) == b"back"
    for listening in held:
        listening.close()


def test_nobody_holds_a_number_that_was_given_back(gate):
    listening = listen_at_number(HERE, 7, gate)
    listening.close()

    def is_free() -> bool:
        try:
            dialer.dial((HERE, 7), DEADLINE_S).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(is_free)  # the end of a connection notifies the gate
    with pytest.raises(ConnectionRefusedError, match=f"on {HERE} accepts connections to number 7 of port {gate}"):
        dialer.dial((HERE, 7), DEADLINE_S)


def test_a_taken_number_is_refused_until_its_holder_ends(gate, monkeypatch):
    first = listen_at_number(HERE, 29500, gate)
    with pytest.raises(OSError, match="another listener of this machine has the number 29500") as caught:
        listen_at_number(HERE, 29500, gate)
    assert caught.value.errno == errno.EADDRINUSE
    monkeypatch.setattr("paceline.comm.store.tcp_store.is_loopback", lambda _: False)
    with pytest.raises(PortInUseError, match=f"share port {gate} of {HERE}.*number 29500.*choose another port"):
        listen(HERE, 29500, b"s" * 32)
    first.close()
    listen_at_number(HERE, 29500, gate).close()  # the next listener does not wait for the gate to notice


def test_a_foreign_address_is_refused(gate, monkeypatch):
    with pytest.raises(OSError, match="Cannot assign requested address") as caught:
        listen_at_number("192.0.2.1", 0, gate)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(StoreConnectionError, match="is not an address of this machine"):
        listen("192.0.2.1", 0, b"s" * 32)


def test_a_port_of_another_program_is_refused(monkeypatch):
    monkeypatch.setattr("paceline.comm.store.tcp_store.is_loopback", lambda _: False)
    with socket.create_server((HERE, 0)) as other:
        port, name = other.getsockname()[1], random_name()
        monkeypatch.setenv(dialer.PORT_VARIABLE, str(port))
        monkeypatch.setenv(dialer.GATE_VARIABLE, name)
        refused = pytest.raises(PortInUseError, match=rf"share port {port} .*by process {os.getpid()} ")
        with contextlib.closing(PortMultiplexer(port, name)), refused:
            listen(HERE, 0, b"s" * 32)


def test_a_stranger_is_sent_away_and_others_come(gate):
    listening = listen_at_number(HERE, 5, gate)
    strangers = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"paceln/q" + bytes(56), b"\0")
    for words in strangers:
        with _reach(gate, words) as connection:
            assert _is_ended(connection)
    with dialer.dial((HERE, 5), DEADLINE_S), listening.accept()[0]:
        pass
    listening.close()


def test_silent_strangers_keep_nobody_out(gate):
    listening = listen_at_number(HERE, 5, gate)
    with contextlib.ExitStack() as silent:
        oldest = silent.enter_context(_reach(gate, header_for(5)[:3]))
        for _ in range(MAX_PENDING_CLIENTS):
            silent.enter_context(_reach(gate, b""))
        assert _is_ended(oldest)
        with dialer.dial((HERE, 5), DEADLINE_S), listening.accept()[0]:
            pass
    listening.close()


def test_who_does_not_know_of_the_port_is_told(gate):
    listening = listen_at_number(HERE, 5, gate)
    refused = pytest.raises(AuthenticationError, match="one port serves all listeners .* the same PACELINE_PORT")
    with socket.create_connection((HERE, gate), DEADLINE_S) as connection, refused:
        prove(connection, KEY, PeerHello("node"), DEADLINE_S)
    listening.close()


def test_a_listener_that_is_no_gate_is_told_from_one(monkeypatch):
    secret = b"s" * 32
    with contextlib.closing(StoreServer(socket.create_server((HERE, 0)), secret)) as server:
        monkeypatch.setenv(dialer.PORT_VARIABLE, str(server.port))
        monkeypatch.setattr(dialer, "is_reachable_from_outside", lambda _: True)
        with pytest.raises(PeerGoneError, match="start every launcher with the same --port"):
            dialer.dial((HERE, 29500), DEADLINE_S)


def test_a_doorkeeper_admits_behind_the_port(gate):
    admitted: list[tuple[int, Connection]] = []
    came = threading.Event()

    def admit(connection: Connection, hello: PeerHello) -> None:
        admitted.append((hello.rank, connection))
        came.set()

    keeper = AuthenticatedListener(listen_at_number(HERE, 0, gate), KEY, "links", admit)
    with dialer.dial((HERE, keeper.port), DEADLINE_S) as connection:
        prove(connection, KEY, PeerHello("links", 3), DEADLINE_S)
        assert came.wait(DEADLINE_S) and admitted[0][0] == 3
        admitted[0][1].close()
    keeper.close()


def test_both_ends_send_short_messages_at_once():
    """Without TCP_NODELAY, the system delays the second message until the first one is acknowledged."""
    admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    keeper = AuthenticatedListener(socket.create_server((HERE, 0)), KEY, "links", lambda each, _: admitted.put(each))
    with dialer.dial((HERE, keeper.port), DEADLINE_S) as connection:
        prove(connection, KEY, PeerHello("links", 3), DEADLINE_S)
        with admitted.get(timeout=DEADLINE_S) as other:
            assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in (connection, other))
    keeper.close()


def test_a_store_is_served_behind_the_port(gate, monkeypatch):
    monkeypatch.setattr("paceline.comm.store.tcp_store.is_loopback", lambda _: False)
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    server = TCPStore(HERE, 29500, is_master=True, wait_for_workers=False, timeout=DEADLINE_S)
    client = TCPStore(HERE, 29500, wait_for_workers=False, timeout=DEADLINE_S)
    client.set("key", b"value")
    assert server.get("key") == b"value" and server.port == 29500 != gate
    client.close()
    server.close()


def test_without_a_launcher_the_first_becomes_the_gate(monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", secrets.token_hex(16))
    monkeypatch.delenv(dialer.GATE_VARIABLE, raising=False)
    monkeypatch.setattr(port_multiplexer, "_multiplexers", {})
    monkeypatch.setattr(dialer, "is_reachable_from_outside", lambda _: True)
    port = reserved_port()
    monkeypatch.setenv(dialer.PORT_VARIABLE, str(port))
    held: list[NumberedListener] = []
    threads = [threading.Thread(target=lambda: held.append(listen_at_number(HERE, 0, port))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len({each.getsockname() for each in held}) == 8 and len(port_multiplexer._multiplexers) == 1
    for each in held:
        with dialer.dial(each.getsockname(), DEADLINE_S), each.accept()[0]:
            each.close()
    for each in port_multiplexer._multiplexers.values():
        each.close()


def test_the_end_of_the_gate_is_noticed(monkeypatch):
    port, name = reserved_port(), random_name()
    monkeypatch.setenv(dialer.GATE_VARIABLE, name)
    gate = PortMultiplexer(port, name)
    listening = listen_at_number(HERE, 0, port)
    gate.close()
    gate.close()
    with pytest.raises(ConnectionAbortedError, match="this machine.s port has exited"):
        listening.accept()
    with pytest.raises(ConnectionAbortedError, match=f"listens on port {port} of this machine has exited"):
        listen_at_number(HERE, 0, port)
    listening.close()
