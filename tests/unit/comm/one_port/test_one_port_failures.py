"""A single port without free descriptors, with unauthorized requests for numbers, and with a gate that forks."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from gates import DEADLINE_S, HERE, open_gate
from launching import wait_until
from store_kinds import exit_code
from world import reserved_port

from paceline.comm.one_port import dialer, port_multiplexer
from paceline.comm.one_port.port_multiplexer import PortMultiplexer, listen_at_number, random_name
from paceline.comm.security.secret import job_secret
from paceline.train.checkpoint.peer_memory import client as copies
from paceline.train.checkpoint.peer_memory.server import CacheServer

RESETS = struct.pack("ii", 1, 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with open_gate(monkeypatch) as port:
        yield port


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_lack_of_descriptors_is_not_taken_for_the_end(gate):
    listening = listen_at_number(HERE, 0, gate)
    before = open_descriptors()
    with dialer.dial(listening.getsockname(), DEADLINE_S):
        wait_until(lambda: open_descriptors() <= before + 1)  # the gate has closed its own descriptor
        with no_more_descriptors(), pytest.raises(OSError, match="Too many open files") as caught:
            listening.accept()
        assert caught.value.errno == errno.EMFILE
    with dialer.dial(listening.getsockname(), DEADLINE_S), listening.accept()[0]:
        listening.close()


def test_connections_that_were_reset_are_skipped(gate):
    listening = listen_at_number(HERE, 0, gate)
    for _ in range(3):
        with dialer.dial(listening.getsockname(), DEADLINE_S) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
    with dialer.dial(listening.getsockname(), DEADLINE_S) as connection:
        accepted, address = listening.accept()
        with accepted:
            assert address == connection.getsockname()
    listening.close()


@pytest.mark.parametrize("request_", [b"\xff\xfe", b"0 \x00", b"x " + HERE.encode(), b"9" * 1000])
def test_a_request_that_is_none_is_answered(gate, request_):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect("\0" + os.environ[dialer.GATE_VARIABLE])
        connection.send(request_)
        code, _, words = connection.recv(1024).decode().partition(" ")
        assert int(code) != 0 and words
    listen_at_number(HERE, 0, gate).close()


def test_copies_of_checkpoints_come_through_the_port(gate, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("paceline.comm.store.tcp_store.is_loopback", lambda _: False)
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    with closing(CacheServer(HERE)) as service:
        with closing(copies.dial(service.open(str(tmp_path / "door"), job_secret()))) as near:
            elsewhere = near.listen()
        assert int(elsewhere.address.rpartition(":")[2]) != gate
        with closing(copies.dial(elsewhere.address)) as far:
            assert far.look("/checkpoints").vault == elsewhere.vault


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_gate_open(monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", secrets.token_hex(16))
    monkeypatch.delenv(dialer.GATE_VARIABLE, raising=False)
    monkeypatch.setattr(port_multiplexer, "_multiplexers", {})
    port = reserved_port()
    first = listen_at_number(HERE, 0, port)
    waiting, ending = os.pipe()
    child = os.fork()  # as a DataLoader does
    if child == 0:
        os.close(ending)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        for each in list(port_multiplexer._multiplexers.values()):
            each.close()  # as happens when this process exits
        port_multiplexer._multiplexers.clear()
        with closing(listen_at_number(HERE, 0, port)):  # another process takes its place
            assert len(port_multiplexer._multiplexers) == 1
    finally:
        os.close(ending)
        assert exit_code(child) == 0
        first.close()
        for each in port_multiplexer._multiplexers.values():
            each.close()


def test_a_child_just_forked_does_not_keep_the_port_open(monkeypatch):
    port = reserved_port()
    copies: list[socket.socket] = []
    for _ in range(2):  # the second multiplexer takes the place of the first
        monkeypatch.setenv(dialer.GATE_VARIABLE, random_name())
        with closing(PortMultiplexer(port, os.environ[dialer.GATE_VARIABLE])) as multiplexer:
            listen_at_number(HERE, 0, port).close()
            copies += [key.fileobj.dup() for key in list(multiplexer._selector.get_map().values())]  # like a fork
    for copy in copies:
        copy.close()


def test_silent_hosts_are_told_from_those_that_answer(monkeypatch):
    answers, refuses, silent = "127.0.0.1", "127.0.0.4", ("127.0.0.2", "127.0.0.3")
    port = reserved_port()
    monkeypatch.setenv(dialer.PORT_VARIABLE, str(port))
    with contextlib.ExitStack() as opened:
        for host in (answers, *silent):
            opened.enter_context(socket.create_server((host, port), backlog=0))
        for host in silent:  # a full queue drops new connections, as a firewall does
            for _ in range(4):
                waiting = opened.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex((host, port))
        assert dialer.silent_hosts([answers, refuses, *silent], HERE, 0.5) == set(silent)
