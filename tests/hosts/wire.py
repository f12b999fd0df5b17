"""Decides when frames in transit arrive and which are dropped, without using a device or a clock."""

from __future__ import annotations

import random
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VNET_HEADER = 10  # bytes before each frame: how to split it into packets, and the position of its checksum
_SYN, _ACK = 0x02, 0x10
_LIMIT = 256 << 20  # bytes in transit; frames beyond this limit are dropped, as in any queue


@dataclass(frozen=True)
class Conditions:
    """Conditions of a network: `delay_ms` is the one-way delay, and `loss` the probability that a packet is lost.

    `cut` contains pairs of hosts, the lower number first. If `port` is given, only TCP connections over IPv4 to this
    port are cut. `doors` contains pairs of a host behind a firewall and a port on which it accepts TCP connections over
    IPv4 from other hosts, or 0 if it accepts none. The firewall does not affect the host's own connections to others.
    """

    delay_ms: float = 0.0
    loss: float = 0.0
    seed: int = 0
    cut: frozenset[tuple[int, int]] = frozenset()
    port: int = 0
    doors: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if self.delay_ms < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"delay_ms={self.delay_ms} must not be negative, loss={self.loss} must be in [0, 1]")


class Wire:
    """Frames in transit between ports; they arrive in the order in which they were sent."""

    def __init__(self, ports: Sequence[tuple[int, int, bytes]], conditions: Conditions) -> None:
        """Creates a wire between ports, each given as (host, network, MAC address)."""
        self._hosts = [host for host, _, _ in ports]
        self._at = {address: port for port, (_, _, address) in enumerate(ports)}
        self._others = [
            [other for other in range(len(ports)) if other != port and ports[other][1] == network]
            for port, (_, network, _) in enumerate(ports)
        ]
        self._under_way: deque[tuple[float, int, bytes]] = deque()
        self._nbytes = 0
        self.conditions = conditions
        self._random = random.Random(conditions.seed)

    def send(self, source: int, frame: bytes, now_s: float) -> None:
        target = self._at.get(frame[VNET_HEADER : VNET_HEADER + 6])
        for port in self._others[source] if target is None else [target]:
            if self._lost(source, port, frame) or self._nbytes > _LIMIT:
                continue
            due_s = now_s + self.conditions.delay_ms / 1000
            if self._under_way:
                due_s = max(due_s, self._under_way[-1][0])
            self._under_way.append((due_s, port, frame))
            self._nbytes += len(frame)

    def due_s(self) -> float | None:
        """Returns the arrival time of the next frame."""
        return self._under_way[0][0] if self._under_way else None

    def arrived(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        while self._under_way and self._under_way[0][0] <= now_s:
            _, port, frame = self._under_way.popleft()
            self._nbytes -= len(frame)
            yield port, frame

    def _lost(self, source: int, target: int, frame: bytes) -> bool:
        first, second = sorted((self._hosts[source], self._hosts[target]))
        if (first, second) in self.conditions.cut and self.conditions.port in (0, *_tcp_ports(frame)):
            return True
        if self._is_kept_out(self._hosts[target], frame):
            return True
        return self.conditions.loss > 0 and self._random.random() < self.conditions.loss

    def _is_kept_out(self, target: int, frame: bytes) -> bool:
        """Returns True if a host's firewall drops a frame that opens a connection to a closed port."""
        doors = {port for host, port in self.conditions.doors if host == target}
        if not doors or not (ports := _tcp_ports(frame)):
            return False
        packet = frame[VNET_HEADER + 14 :]
        flags = packet[4 * (packet[0] & 15) + 13]
        return flags & (_SYN | _ACK) == _SYN and ports[1] not in doors


def _tcp_ports(frame: bytes) -> tuple[int, ...]:
    """Returns the ports of a frame of TCP over IPv4, or an empty result for other frames."""
    packet = frame[VNET_HEADER + 14 :]
    if frame[VNET_HEADER + 12 : VNET_HEADER + 14] != b"\x08\x00" or packet[9] != socket.IPPROTO_TCP:
        return ()
    ports: tuple[int, ...] = struct.unpack_from(">HH", packet, 4 * (packet[0] & 15))
    return ports
