"""Connects to a listener of another machine: at a port of its own, or at the one that all of that machine share."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterable

from paceline.durations import for_socket
from paceline.one_port.choice import chosen_port, leads_out
from paceline.one_port.header import NOBODY, PASSED_ON, header_for
from paceline.routes import for_resolver
from paceline.security.handshake import PeerGoneError


def dial(
    address: tuple[str, int], timeout_s: float, source: str | None = None, reach_s: float | None = None
) -> socket.socket:
    """Returns a connection to a host, and to a port or number there.

    Args:
        address: the host and the port; with one port for the job, the number behind it.
        timeout_s: how long all of it may take, in seconds.
        source: this machine's address to connect from; by default the system chooses it.
        reach_s: how long the machine may take to accept a connection, if that is less.

    Raises:
        OSError: the machine cannot be reached, or nobody listens there.
        HandshakeUnfinishedError: the process at the port closed the connection; another attempt may work.
    """
    deadline = time.monotonic() + timeout_s
    port = chosen_port()
    origin = None if source is None else (source, 0)
    patience_s = timeout_s if reach_s is None else min(timeout_s, reach_s)
    if port is None or not leads_out(address[0]):
        return _connected(*address, patience_s, origin)
    connection = _connected(address[0], port, patience_s, origin)
    try:
        connection.settimeout(for_socket(deadline - time.monotonic()))
        _ask_for(connection, address[1])
    except BaseException:
        connection.close()
        raise
    return connection


def silent_hosts(hosts: Iterable[str], source: str, reach_s: float) -> set[str]:
    """Returns the hosts that did not answer at the one port within `reach_s` seconds; a refusal is an answer too.

    All are asked at the same time.

    Args:
        hosts: their addresses.
        source: this machine's address to connect from.
        reach_s: how long to wait for them together, in seconds.
    """
    port = chosen_port()
    assert port is not None
    deadline = time.monotonic() + reach_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for host in hosts:
            with contextlib.suppress(OSError):  # whoever dials the host meets the error again, and tells it
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setblocking(False)
                probe.bind((source, 0))
                if probe.connect_ex((host, port)) == errno.EINPROGRESS:
                    waiting.register(probe, selectors.EVENT_WRITE, host)
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                waiting.unregister(key.fileobj)
        return {key.data for key in waiting.get_map().values()}


def _connected(host: str, port: int, timeout_s: float, origin: tuple[str, int] | None) -> socket.socket:
    connection = socket.create_connection((for_resolver(host), port), timeout_s, origin)  # type: ignore[arg-type]  # bytes work too
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # short messages wait for nothing
    return connection


def _ask_for(connection: socket.socket, number: int) -> None:
    host, port = connection.getpeername()[:2]
    try:
        connection.sendall(header_for(number))
        answer = connection.recv(1)
    except ConnectionError:
        answer = b""
    if answer == NOBODY:
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, f"no process of {host} waits for connections to number {number} behind port {port}"
        )
    if answer != PASSED_ON:
        raise PeerGoneError(
            f"the process at {host}:{port} closed the connection when it was asked for number {number}: it has ended, "
            "or does not serve all of its machine's listeners there; start every launcher with the same --port, or "
            "every rank with the same PACELINE_PORT"
        )
