"""Connections to listeners on other machines, either on the listener's own port or on the machine's single port.

PACELINE_PORT determines whether each machine in a job has a single port for all connections from other machines.
Connections within a machine never use it: they are Unix sockets or loopback connections.

The first bytes of a connection to a multiplexer contain the listener's number. They do not authenticate the
client.

    connecting -> multiplexer   header: magic, number; 64 bytes
    multiplexer -> connecting   PASSED_ON (the holder of the number sends all later bytes), or NO_LISTENER

The header is longer than the first message that Paceline's other listeners expect, so a listener that is not a
multiplexer rejects it immediately.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Mapping

from paceline.comm.security.handshake import HELLO_BYTES, PeerGoneError, is_hello
from paceline.comm.security.secret import is_loopback, require_secret
from paceline.durations import socket_timeout_s, whole_number

DEFAULT_ROUTE_TARGETS = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): no machine has them, so packets take the default route."""

_DISCARD_PORT = 9


def resolver_name(host: str) -> bytes | str:
    """Encodes an ASCII host name or address as bytes; given a `str`, `socket` spends 4 to 6 ms importing a codec."""
    return host.encode() if host.isascii() else host


def source_address(target: str) -> str:
    """Returns the local address from which packets to `target`, a host name or an address, are sent.

    Raises an OSError if there is no route to `target`.
    """
    for family, _, _, _, address in socket.getaddrinfo(resolver_name(target), _DISCARD_PORT, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(address)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {target}")


PORT_VARIABLE = "PACELINE_PORT"
GATE_VARIABLE = "PACELINE_GATE"  # the name of the Unix socket on which the launcher assigns numbers to its workers
PASSED_ON = b"+"
NO_LISTENER = b"-"

_LARGEST = 65535
_MAGIC = b"paceln/p"
_HEADER = struct.Struct("<8sI52x")
HEADER_BYTES = _HEADER.size


def chosen_port(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the machine's port, or None if each listener has its own port.

    Raises a ValueError if PACELINE_PORT does not contain a port.
    """
    text = environment.get(PORT_VARIABLE)
    if not text:
        return None
    port = whole_number(text, least=1, most=_LARGEST)
    if port is None:
        raise ValueError(f"{PORT_VARIABLE} is {text[:100]!r}; it must be a port from 1 to {_LARGEST}")
    return port


def choose_port(port: int) -> None:
    """Sets the port for this process and its children; raises a ValueError if the environment contains another one."""
    if not 1 <= port <= _LARGEST:
        raise ValueError(f"the port is {port}; it must be from 1 to {_LARGEST}")
    given = chosen_port()
    if given not in (None, port):
        raise ValueError(f"the port is {port} here and {given} in {PORT_VARIABLE}; leave one of them out")
    os.environ[PORT_VARIABLE] = str(port)


def is_reachable_from_outside(host: str) -> bool:
    """Returns True if a host name or an address is reachable from other machines (not a loopback address).

    Raises an OSError if the name cannot be resolved.
    """
    return not is_loopback(str(socket.getaddrinfo(resolver_name(host), None, type=socket.SOCK_STREAM)[0][4][0]))


def header_for(number: int) -> bytes:
    """Returns the header of a connection to the listener with this number."""
    return _HEADER.pack(_MAGIC, number)


def is_wrong(beginning: bytes) -> bool:
    """Returns True if the received bytes cannot be the beginning of a header.

    >>> is_wrong(b""), is_wrong(header_for(7)[:5]), is_wrong(b"GET / HT")
    (False, False, True)
    """
    return beginning[: len(_MAGIC)] != _MAGIC[: len(beginning)]


def has_no_header(beginning: bytes) -> bool:
    """Returns True if the peer has sent a complete handshake hello without a preceding multiplexer header."""
    return len(beginning) >= HELLO_BYTES and is_hello(beginning)


def number_in(header: bytes) -> int:
    """Returns the number in a header."""
    number: int = _HEADER.unpack(header)[1]
    return number


def dial(
    address: tuple[str, int], timeout_s: float, source: str | None = None, reach_s: float | None = None
) -> socket.socket:
    """Connects to a port on a host or, in a job with a single port, to one of the host's numbered listeners.

    Args:
        address: the host and the port or, in a job with a single port, the number.
        timeout_s: the timeout for connecting and exchanging the header, in seconds.
        source: the local address from which to connect; the system chooses one by default.
        reach_s: a shorter timeout for connecting, in seconds.

    Raises:
        HandshakeUnfinishedError: the process listening on the port closed the connection; another attempt may succeed.
    """
    deadline = time.monotonic() + timeout_s
    port = chosen_port()
    origin = None if source is None else (source, 0)
    patience_s = timeout_s if reach_s is None else min(timeout_s, reach_s)
    if port is None or not is_reachable_from_outside(address[0]):
        return _connected(*address, patience_s, origin)
    connection = _connected(address[0], port, patience_s, origin)
    try:
        connection.settimeout(socket_timeout_s(deadline - time.monotonic()))
        _request_number(connection, address[1])
    except BaseException:
        connection.close()
        raise
    return connection


def dial_with_secret(address: tuple[str, int], timeout_s: float, secret: bytes | None) -> socket.socket:
    """Connects like `dial`; raises a ValueError if the address is not loopback and there is no secret."""
    connection = dial(address, timeout_s)
    try:
        require_secret(connection.getpeername()[0], secret)
        if connection.getpeername() == connection.getsockname():
            # A socket that connects to a free port on its own machine can, by chance, connect to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        connection.close()
        raise
    return connection


def silent_hosts(hosts: Iterable[str], source: str, reach_s: float) -> set[str]:
    """Returns the hosts that did not answer on the single port in time; a refused connection counts as an answer.

    All hosts are tried concurrently from the local address `source`, within `reach_s` seconds in total.
    """
    port = chosen_port()
    assert port is not None
    deadline = time.monotonic() + reach_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for host in hosts:
            with contextlib.suppress(OSError):  # connecting to the host later raises the error again
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
    connection = socket.create_connection((resolver_name(host), port), timeout_s, origin)  # type: ignore[arg-type]  # accepts bytes
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _request_number(connection: socket.socket, number: int) -> None:
    host, port = connection.getpeername()[:2]
    try:
        connection.sendall(header_for(number))
        answer = connection.recv(1)
    except ConnectionError:
        answer = b""
    if answer == NO_LISTENER:
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, f"no process on {host} accepts connections to number {number} of port {port}"
        )
    if answer != PASSED_ON:
        raise PeerGoneError(
            f"the process at {host}:{port} closed the connection when it was asked for number {number}: it has ended, "
            "or does not serve all of its machine's listeners there; start every launcher with the same --port, or "
            "every rank with the same PACELINE_PORT"
        )
