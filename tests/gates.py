"""A gate on loopback, which this process uses as if the others were on another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from world import reserved_port

from paceline.one_port import choice, dialing
from paceline.one_port.gate import Gate
from paceline.one_port.listener import random_name

HERE = "127.0.0.1"
DEADLINE_S = 30.0


@contextlib.contextmanager
def open_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yields the port."""
    port, name = reserved_port(), random_name()
    monkeypatch.setenv(choice.VARIABLE, str(port))
    monkeypatch.setenv(choice.GATE_VARIABLE, name)
    monkeypatch.setattr(dialing, "leads_out", lambda _: True)
    with contextlib.closing(Gate(port, name)):
        yield port
