"""Tests decisions about frames in transit, without using a device."""

from __future__ import annotations

import struct

import pytest

from hosts.wire import VNET_HEADER, Conditions, Wire

PORTS = [(0, 0, b"host-0"), (1, 0, b"host-1"), (2, 0, b"host-2"), (0, 1, b"net1-0"), (1, 1, b"net1-1")]


def frame(to: bytes, content: bytes = b"") -> bytes:
    return bytes(VNET_HEADER) + to + content


def targets(wire: Wire, now_s: float = 0.0) -> list[int]:
    return [port for port, _ in wire.arrived(now_s)]


def test_a_frame_goes_to_its_address_alone():
    wire = Wire(PORTS, Conditions())
    wire.send(0, frame(b"host-2"), 0.0)
    assert targets(wire) == [2]


def test_a_broadcast_goes_to_all_others_of_its_network():
    wire = Wire(PORTS, Conditions())
    wire.send(1, frame(b"\xff" * 6), 0.0)
    assert targets(wire) == [0, 2]


def test_a_frame_arrives_after_the_delay_and_not_before():
    wire = Wire(PORTS, Conditions(delay_ms=10))
    wire.send(0, frame(b"host-1"), 5.0)
    assert wire.due_s() == pytest.approx(5.01)
    assert targets(wire, 5.009) == []
    assert targets(wire, 5.011) == [1]


def test_a_shorter_delay_does_not_reorder():
    wire = Wire(PORTS, Conditions(delay_ms=10))
    wire.send(0, frame(b"host-1", b"first"), 0.0)
    wire.conditions = Conditions()
    wire.send(0, frame(b"host-1", b"second"), 0.001)
    assert [content[-5:] for _, content in wire.arrived(0.02)] == [b"first", b"econd"]


def test_a_cut_separates_one_pair_only_in_both_directions():
    wire = Wire(PORTS, Conditions(cut=frozenset({(0, 1)})))
    for source, to in [(0, b"host-1"), (1, b"host-0"), (3, b"net1-1"), (2, b"host-1")]:
        wire.send(source, frame(to), 0.0)
    assert targets(wire) == [1]


def test_loss_follows_the_seed():
    def arrived(seed: int) -> list[bytes]:
        wire = Wire(PORTS, Conditions(loss=0.5, seed=seed))
        for number in range(64):
            wire.send(0, frame(b"host-1", bytes([number])), 0.0)
        return [content for _, content in wire.arrived(0.0)]

    assert arrived(1) == arrived(1) != arrived(2)


@pytest.mark.parametrize("wrong", [{"delay_ms": -1}, {"loss": 1.5}])
def test_conditions_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Conditions(**wrong)


def segment(to: bytes, port: int, flags: int) -> bytes:
    """Returns a frame of TCP over IPv4 that is addressed to a port."""
    ip = bytes([0x45]) + bytes(8) + bytes([6]) + bytes(10)
    tcp = struct.pack(">HH8xBB", 40_000, port, 0x50, flags)
    return frame(to, bytes(6) + b"\x08\x00" + ip + tcp)


@pytest.mark.parametrize(
    ("to", "port", "flags", "passes"),
    [
        (b"host-1", 29500, 0x02, True),  # SYN
        (b"host-1", 29400, 0x02, False),
        (b"host-1", 29400, 0x12, True),  # SYN and ACK: host 1 requested this connection
        (b"host-1", 29400, 0x10, True),
        (b"host-2", 29500, 0x02, False),
        (b"host-2", 29500, 0x12, True),
        (b"host-0", 29400, 0x02, True),
    ],
)
def test_a_firewall_keeps_out_who_asks_at_other_ports(to, port, flags, passes):
    wire = Wire(PORTS, Conditions(doors=frozenset({(1, 29500), (2, 0)})))
    wire.send(2 if to != b"host-2" else 1, segment(to, port, flags), 0.0)
    assert bool(targets(wire)) == passes
