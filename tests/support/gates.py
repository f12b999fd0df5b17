"""A gate on the loopback interface. This process treats the gate's address as that of another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from world import reserved_port

from paceline.comm.one_port import dialer
from paceline.comm.one_port.port_multiplexer import PortMultiplexer, random_name

HERE = "127.0.0.1"
DEADLINE_S = 30.0


@contextlib.contextmanager
def open_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yields the port of the gate."""
    port, name = reserved_port(), random_name()
    monkeypatch.setenv(dialer.PORT_VARIABLE, str(port))
    monkeypatch.setenv(dialer.GATE_VARIABLE, name)
    monkeypatch.setattr(dialer, "is_reachable_from_outside", lambda _: True)
    with contextlib.closing(PortMultiplexer(port, name)):
        yield port
