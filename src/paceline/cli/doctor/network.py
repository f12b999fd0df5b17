"""Checks between two machines: connections in both directions, large packets, clock offset and versions."""

from __future__ import annotations

import json
import platform
import socket
import time
from contextlib import closing

from paceline.cli.doctor import Diagnostic, Severity
from paceline.comm.security.handshake import PeerHello, prove, verify
from paceline.comm.security.secret import derive_key
from paceline.comm.security.untrusted_peers import decode_untrusted

CHANNEL = "doctor"
PAYLOAD = 3 << 20
_TIMEOUT_S = 10.0
_ROUNDS = 10
_LARGE_SKEW_S = 0.1
_LONGEST_LINE = 4096


def serve(listener: socket.socket, secret: bytes) -> list[Diagnostic]:
    """Handles one probe on the listening machine; returns the findings."""
    connection, (host, *_) = listener.accept()
    with closing(connection):
        verify(connection, derive_key(secret, CHANNEL), CHANNEL)
        connection.settimeout(_TIMEOUT_S)
        for _ in range(_ROUNDS):
            _receive_line(connection)
            _send_line(connection, {"time": time.time(), "python": platform.python_version()})
        _receive(connection, PAYLOAD)
        connection.sendall(bytes(PAYLOAD))
        request = _receive_line(connection)
        finding = _connect_back(host, int(str(request["port"])), secret)
        _send_line(connection, {"error": "" if finding.level is Severity.GOOD else finding.seen})
    return [Diagnostic(Severity.GOOD, "visit", f"from {host}: {PAYLOAD >> 20} MiB each way"), finding]


def probe(address: tuple[str, int], secret: bytes) -> list[Diagnostic]:
    """Probes the machine that is listening on `address`; returns the findings."""
    place = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, _TIMEOUT_S)
    except OSError as error:
        why = "no doctor listens there, or a firewall blocks the connection"
        return [
            Diagnostic(
                Severity.BAD,
                "there",
                f"{place}: {error}",
                why,
                "open the port in the firewall, or pass another port to --listen",
            )
        ]
    with closing(connection):
        prove(connection, derive_key(secret, CHANNEL), PeerHello(CHANNEL))
        connection.settimeout(_TIMEOUT_S)
        findings = [_clocks(connection)]
        try:
            findings.append(_payload(connection))
        except TimeoutError:
            why = "small packets arrive and large ones do not, so some MTU on the route is too large"
            fix = "run ip link set dev INTERFACE mtu 1400 on both machines, or allow ICMP 'fragmentation needed'"
            return [
                *findings,
                Diagnostic(Severity.BAD, "large packets", f"{PAYLOAD >> 20} MiB did not arrive", why, fix),
            ]
        findings.append(_await_connection_back(connection, secret))
    return findings


def _clocks(connection: socket.socket) -> Diagnostic:
    best: tuple[float, float] | None = None
    python = ""
    for _ in range(_ROUNDS):
        sent_s = time.time()
        _send_line(connection, {})
        answer = _receive_line(connection)
        rtt_s = time.time() - sent_s
        python = str(answer["python"])
        best = min(best or (rtt_s, 0.0), (rtt_s, float(str(answer["time"])) - sent_s - rtt_s / 2))
    assert best is not None
    rtt_s, skew_s = best
    seen = f"round trip {rtt_s * 1e3:.2f} ms; its clock differs by {skew_s * 1e3:+.1f} ms; it runs Python {python}"
    if abs(skew_s) > _LARGE_SKEW_S:
        why = "the times in the logs of the two machines cannot be compared"
        return Diagnostic(Severity.NOTE, "there", seen, why, "synchronize both clocks, for example with chronyd")
    if python != platform.python_version():
        return Diagnostic(
            Severity.NOTE,
            "there",
            seen,
            "different versions may behave differently",
            "use the same image on both machines",
        )
    return Diagnostic(Severity.GOOD, "there", seen)


def _payload(connection: socket.socket) -> Diagnostic:
    started_s = time.perf_counter()
    connection.sendall(bytes(PAYLOAD))
    _receive(connection, PAYLOAD)
    rate = 2 * PAYLOAD / (time.perf_counter() - started_s)
    return Diagnostic(Severity.GOOD, "large packets", f"{PAYLOAD >> 20} MiB each way at {rate * 8 / 1e9:.2f} Gbit/s")


def _await_connection_back(connection: socket.socket, secret: bytes) -> Diagnostic:
    family = connection.family
    with socket.create_server((connection.getsockname()[0], 0), family=family) as listener:
        listener.settimeout(_TIMEOUT_S)
        _send_line(connection, {"port": listener.getsockname()[1]})
        try:
            caller, _ = listener.accept()
            with closing(caller):
                verify(caller, derive_key(secret, CHANNEL), CHANNEL)
        except TimeoutError:
            return _blocked("it could not connect to this machine", "this machine's")
        error = _receive_line(connection)["error"]
    return (
        _blocked(str(error), "this machine's")
        if error
        else Diagnostic(Severity.GOOD, "back", "it reaches this machine")
    )


def _connect_back(host: str, port: int, secret: bytes) -> Diagnostic:
    try:
        with closing(socket.create_connection((host, port), _TIMEOUT_S / 2)) as connection:
            prove(connection, derive_key(secret, CHANNEL), PeerHello(CHANNEL))
    except OSError as error:
        return _blocked(f"{host}:{port}: {error}", "the other machine's")
    return Diagnostic(Severity.GOOD, "back", f"{host} can be reached too")


def _blocked(seen: str, whose: str) -> Diagnostic:
    why = "ranks connect in both directions, to ports that the kernel chooses"
    return Diagnostic(Severity.BAD, "back", seen, why, f"allow connections from the other machine in {whose} firewall")


def _send_line(connection: socket.socket, content: dict[str, object]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive_line(connection: socket.socket) -> dict[str, object]:
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more or len(line) > _LONGEST_LINE:
            raise ConnectionError("the other machine's doctor closed the connection")
        line += more
    try:
        content = decode_untrusted(json.loads, line)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ConnectionError("the other machine does not run `paceline doctor --listen`")
    return content


def _receive(connection: socket.socket, nbytes: int) -> None:
    while nbytes:
        more = connection.recv(min(nbytes, 1 << 16))
        if not more:
            raise ConnectionError("the other machine's doctor closed the connection")
        nbytes -= len(more)
