"""Connection attempts to a rank that closes the connection without reading."""

from __future__ import annotations

import socket
from itertools import pairwise
from types import SimpleNamespace

import pytest

from paceline.comm.engine.native import bootstrap
from paceline.comm.security.handshake import PeerGoneError, PeerHello

TIMEOUT_S = 10.0


class Clock:
    """A clock that advances only during sleeps, and records their durations."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep))
    return clock


def cut_off(_: float) -> socket.socket:
    raise PeerGoneError("the gate closed the connection")


def dropped_unread(_: float) -> socket.socket:
    here, there = socket.socketpair()
    there.close()
    return here


@pytest.mark.parametrize("opened", [cut_off, dropped_unread])
def test_attempts_have_growing_pauses_until_the_deadline(clock, opened):
    deadline = clock.now_s + TIMEOUT_S
    with pytest.raises(PeerGoneError):
        bootstrap.dial(opened, b"k" * 32, PeerHello("links"), deadline)
    growing = clock.pauses_s[: clock.pauses_s.index(max(clock.pauses_s)) + 1]
    assert growing[0] <= 0.05 and max(growing) <= 1.0 and len(clock.pauses_s) < 50
    assert all(later > earlier for earlier, later in pairwise(growing))
    assert deadline - 0.1 <= clock.now_s <= deadline


def test_another_error_is_raised_at_once(clock):
    def refused(_: float) -> socket.socket:
        raise ConnectionRefusedError("no process listens there")

    with pytest.raises(ConnectionRefusedError):
        bootstrap.dial(refused, b"k" * 32, PeerHello("links"), clock.now_s + TIMEOUT_S)
    assert clock.pauses_s == []
