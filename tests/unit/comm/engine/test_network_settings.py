"""Congestion control for connections between hosts."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from paceline.comm.engine.native import cost_measurement
from paceline.comm.engine.network_settings import (
    CONGESTION_VARIABLE,
    UNMEASURED,
    parse_costs,
    set_congestion_control,
)
from paceline.comm.schedule.cost_model import CostModel, LinkCost


def control_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode()


@contextlib.contextmanager
def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            near.sendall(b"hello")
            far.recv(5)
            far.sendall(b"hello")
            near.recv(5)
            yield near


def test_a_near_peer_is_reached_without_pacing(monkeypatch):
    monkeypatch.delenv(CONGESTION_VARIABLE, raising=False)
    with connected() as near:
        before = control_of(near)
        set_congestion_control(near)
        assert control_of(near) == before if not before.startswith("bbr") else control_of(near) in ("cubic", "reno")


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv(CONGESTION_VARIABLE, "reno")
    with connected() as near:
        set_congestion_control(near)
        assert control_of(near) == "reno"


def test_a_control_that_the_kernel_has_not_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(CONGESTION_VARIABLE, "pigeon")
    with connected() as near, pytest.raises(ValueError, match=r"PACELINE_CONGESTION is 'pigeon', which this kernel"):
        set_congestion_control(near)
    assert Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").exists(), "what the message points to"


@pytest.mark.parametrize("model", [UNMEASURED, CostModel(LinkCost(1e-6, 0.0, 0.0), LinkCost(3e-5, 5e-10, 1e-5), 0.0)])
def test_published_costs_are_read_back(model):
    assert parse_costs(cost_measurement._format(model)) == model
