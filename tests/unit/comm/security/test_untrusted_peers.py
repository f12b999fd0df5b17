"""The number of log lines about rejected connections is bounded."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from launching import wait_until

from paceline.comm.security.authenticated_listener import AuthenticatedListener
from paceline.comm.security.handshake import PeerHello, prove
from paceline.comm.security.untrusted_peers import SHOWN, RejectedConnections
from paceline.errors import AuthenticationError

DEADLINE_S = 20.0
FLOOD = 400


def _wait_for(caplog: pytest.LogCaptureFixture, lines: int) -> list[str]:
    wait_until(lambda: len(caplog.messages) >= lines)
    return caplog.messages


def test_a_flood_at_a_listener_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        keeper = AuthenticatedListener(listener, b"key", "store", lambda connection, _: connection.close())
        for _ in range(FLOOD):
            with socket.create_connection(("127.0.0.1", keeper.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(48))
                stranger.settimeout(DEADLINE_S)
                assert not stranger.recv(1)
        keeper.close()
    *shown, summary = caplog.messages
    assert len(shown) == SHOWN
    assert all("uses a protocol other than" in line for line in shown)
    assert f"refused {FLOOD - SHOWN} more connections for 'store' from 1 address in the last" in summary


@pytest.mark.parametrize(
    "sent", [b"", b"paceln/1", b"paceln/1store".ljust(48, b"\0")], ids=["nothing", "a part", "all"]
)
def test_who_only_goes_away_is_not_logged(caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = AuthenticatedListener(listener, b"key", "store", lambda connection, _: connection.close())
        _knock(keeper.port, sent, reads=True)
        _knock(keeper.port, sent, reads=False)
        _knock(keeper.port, b"GET /", reads=True)
        _wait_for(caplog, 1)
        wait_until(lambda: not any("_check" in thread.name for thread in threading.enumerate()))
        keeper.close()
    (line,) = caplog.messages
    assert "uses a protocol other than" in line


def _knock(port: int, sent: bytes, *, reads: bool) -> None:
    """Sends data and closes the connection, with or without reading the response."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR if reads else socket.SHUT_RDWR)
        while reads and stranger.recv(64):
            pass


def test_another_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = AuthenticatedListener(listener, b"key", "store", lambda connection, _: connection.close())
        with socket.create_connection(("127.0.0.1", keeper.port)) as worker, pytest.raises(AuthenticationError):
            prove(worker, b"another key", PeerHello("store"))
        assert "does not accept this process's proof of the job's secret" in _wait_for(caplog, 1)[0]
        keeper.close()


def test_the_count_is_logged_after_its_period(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RejectedConnections("mesh", period_s=0.3)
    for number in range(SHOWN + 4):
        refusals.add(f"10.0.0.{number}", "no proof")
    assert "refused 4 more connections for 'mesh' from 4 addresses" in _wait_for(caplog, SHOWN + 1)[-1]
    refusals.close()


def test_a_few_refusals_are_all_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RejectedConnections("links")
    for number in range(SHOWN):
        refusals.add("10.0.0.1", f"reason {number}")
    refusals.close()
    assert [line.rpartition(": ")[2] for line in caplog.messages] == [f"reason {number}" for number in range(SHOWN)]


def test_after_a_quiet_period_reasons_are_shown_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RejectedConnections("node", period_s=0.3)
    for _ in range(SHOWN + 1):
        refusals.add("10.0.0.1", "of the flood")
    _wait_for(caplog, SHOWN + 1)
    wait_until(lambda: refusals._timer is None)
    time.sleep(0.3)
    refusals.add("10.0.0.2", "afterwards")
    assert caplog.messages[-1].endswith("afterwards")
    refusals.close()
