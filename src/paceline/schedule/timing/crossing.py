"""Which links a message between two ranks crosses, and what they do to it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.schedule.network import Link, Network, most_with_loss


@dataclass(frozen=True)
class Way:
    """One direction of a link: of a rank to the others of its host, of a host, of a group, or of a pair of hosts."""

    kind: str
    number: int
    direction: str
    other: int = -1

    def name(self, network: Network) -> str:
        """Returns the way as a reader knows it: `host 3 up`, `hosts 1-2`, `rack0 down`."""
        if self.kind == "hosts":
            return f"hosts {self.number}-{self.other}"
        of = network.groups[self.number].name if self.kind == "group" else f"{self.kind} {self.number}"
        return f"{of} {self.direction}"


@dataclass(frozen=True)
class Crossing:
    """What a message meets on its way.

    Attributes:
        latency_s: the seconds from the departure of a byte to its arrival.
        overhead_s: how long the message keeps its sender and its receiver from others.
        most: the most bytes a second that one connection gets there.
        weight: the bytes that a link carries for each byte that arrives.
        ways: the links that it crosses, with their bytes a second.
    """

    latency_s: float
    overhead_s: float
    most: float
    weight: float
    ways: tuple[tuple[Way, float], ...]


def cross(network: Network, source: int, target: int) -> Crossing:
    """Returns what a message from the rank `source` to the rank `target` meets."""
    here, there = network.host_of[source], network.host_of[target]
    if here == there:
        link = network.within_host
        ways = (Way("rank", source, "out"), link.bytes_per_s), (Way("rank", target, "in"), link.bytes_per_s)
        return _crossing([link], link.latency_s, ways)
    ends = network.node_of(here), network.node_of(there)
    between = [
        (Way("host", here, "up"), ends[0].bytes_per_s),
        (Way("host", there, "down"), ends[1].bytes_per_s),
    ]
    uplinks: list[Link] = []
    groups = network.group_of.get(here), network.group_of.get(there)
    for group, direction in zip(groups, ("up", "down"), strict=True):
        if group is not None and groups[0] != groups[1]:
            uplinks.append(network.groups[group].uplink)
            between.append((Way("group", group, direction), uplinks[-1].bytes_per_s))
    latency_s = max(link.latency_s for link in ends) + max((link.latency_s for link in uplinks), default=0.0)
    own = network.pairs.get((here, there))
    if own is not None:
        between.append((Way("hosts", here, "", there), own.bytes_per_s))
        return _crossing([*ends, *uplinks, own], own.latency_s, tuple(between))
    return _crossing([*ends, *uplinks], latency_s, tuple(between))


def _crossing(links: list[Link], latency_s: float, ways: tuple[tuple[Way, float], ...]) -> Crossing:
    arrives = 1.0
    for link in links:
        arrives *= 1 - link.loss
    overhead_s = max(link.overhead_s for link in links)
    return Crossing(latency_s, overhead_s, most_with_loss(latency_s, 1 - arrives), 1 / arrives, ways)
