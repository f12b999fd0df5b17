"""Network model: hosts and their links, racks or regions that share an uplink, and the ranks on the hosts.

Every link is full duplex. A message between hosts passes up the source's link and down the target's link, and through
the uplinks of both groups if it leaves a group. The latency of the message is the larger of the two hosts' link
latencies. If the message passes through uplinks, their largest latency is added. If `pairs` contains a link for the two
hosts, the latency of this link applies instead, and messages between these hosts also share its bandwidth.

Packet loss has two effects. If a fraction p of the packets is lost, retransmissions reduce a rate r to r (1 - p), and
TCP slows down to at most MSS / RTT * sqrt(3 / (2 p)) (Mathis et al. 1997, "The macroscopic behavior of the TCP
congestion avoidance algorithm").

`describe_differences` derives a network from measurements between all pairs of hosts. The measurements follow the
rounds of a tournament, with as many pairs as possible at the same time, because the bottleneck of a shared link, such
as a rack's uplink, is visible only under concurrent traffic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import sqrt
from statistics import median, median_high
from typing import TypeAlias

from paceline.comm.schedule.cost_model import CostModel, LinkCost

MSS_NBYTES = 1448
"""The payload size of a TCP segment on Ethernet, in bytes."""


@dataclass(frozen=True)
class NetworkLink:
    """A link.

    Attributes:
        latency_s: the time from the sending of a byte to its arrival, in seconds.
        bytes_per_s: the rate in each direction, in bytes per second.
        loss: the fraction of packets that are lost.
        overhead_s: the time for which a message of any length occupies its sender and its receiver, in seconds.
    """

    latency_s: float
    bytes_per_s: float
    loss: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.overhead_s < 0 or self.bytes_per_s <= 0 or not 0 <= self.loss < 1:
            raise ValueError(
                f"{self} is not a valid link: it needs a rate above 0, a loss from 0 to below 1, and times that are "
                "not negative"
            )

    @property
    def cost(self) -> LinkCost:
        """The cost of a message on the link, as used in the closed-form expressions."""
        rate = min(self.bytes_per_s * (1 - self.loss), most_with_loss(self.latency_s, self.loss))
        return LinkCost(self.latency_s + self.overhead_s, 1 / rate, self.overhead_s)


def most_with_loss(latency_s: float, loss: float) -> float:
    """Returns the maximum rate, in bytes per second, of a TCP connection over a path with packet loss."""
    if loss == 0 or latency_s == 0:
        return float("inf")
    return MSS_NBYTES / (2 * latency_s) * sqrt(1.5 / loss)


@dataclass(frozen=True)
class UplinkGroup:
    """A rack or a region: hosts, given by number, that share one uplink for traffic into and out of the group."""

    name: str
    hosts: tuple[int, ...]
    uplink: NetworkLink


@dataclass(frozen=True)
class Network:
    """Hosts, their ranks and their links.

    Attributes:
        hosts: the ranks on each host.
        within_host: the link between two ranks on a host. All transfers from a rank share the rate, and so do all
            transfers to a rank.
        node: the link of each host, which its ranks share.
        groups: the racks or regions; a host is in at most one of them.
        pairs: the additional links between pairs of hosts, keyed by (source, target).
        gamma_s_per_byte: the time that a rank takes to reduce a byte, in seconds.
        nodes: the links of individual hosts, where they differ from `node`.
    """

    hosts: tuple[tuple[int, ...], ...]
    within_host: NetworkLink
    node: NetworkLink
    groups: tuple[UplinkGroup, ...] = ()
    pairs: Mapping[tuple[int, int], NetworkLink] = field(default_factory=dict)
    gamma_s_per_byte: float = 0.0
    nodes: Mapping[int, NetworkLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise ValueError(
                "hosts must list each rank exactly once, starting at 0, and none may be empty; got "
                f"{_short(self.hosts)}"
            )
        named = [host for group in self.groups for host in group.hosts]
        numbers = {*named, *self.nodes, *(host for pair in self.pairs for host in pair)}
        if len(set(named)) < len(named) or not numbers <= set(range(len(self.hosts))):
            raise ValueError(
                f"groups, pairs and nodes must refer to hosts 0 to {len(self.hosts) - 1}, each in at most one group; "
                f"got {sorted(numbers)}"
            )

    @classmethod
    def uniform(
        cls, n_hosts: int, per_host: int, *, node: NetworkLink, within_host: NetworkLink, gamma_s_per_byte: float = 0.0
    ) -> Network:
        """Returns a network of equal hosts with `per_host` ranks each, numbered host by host."""
        starts = range(0, n_hosts * per_host, per_host)
        hosts = tuple(tuple(range(first, first + per_host)) for first in starts)
        return cls(hosts, within_host, node, gamma_s_per_byte=gamma_s_per_byte)

    @classmethod
    def of_costs(cls, model: CostModel, hosts: tuple[tuple[int, ...], ...]) -> Network:
        """Returns a network with the costs of `model`. A message first occupies its ranks and is then in flight.

        Each of these two times is set to half of a measured alpha, because the measurement does not separate the time
        for system calls from the time for the network and for waking a thread.
        """

        def link(cost: LinkCost) -> NetworkLink:
            return NetworkLink(cost.alpha_s - cost.busy_s, 1 / cost.beta_s_per_byte, overhead_s=cost.busy_s)

        return cls(hosts, link(model.within_host), link(model.between_hosts), gamma_s_per_byte=model.gamma_s_per_byte)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @cached_property
    def host_of(self) -> Mapping[int, int]:
        """The host of each rank."""
        return {rank: number for number, host in enumerate(self.hosts) for rank in host}

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """A mapping from each host in a group to the number of the group."""
        return {host: number for number, group in enumerate(self.groups) for host in group.hosts}

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts have the same links and the same number of ranks, numbered host by host."""
        per_host = len(self.hosts[0])
        in_order = all(
            tuple(host) == tuple(range(number * per_host, (number + 1) * per_host))
            for number, host in enumerate(self.hosts)
        )
        return in_order and not (self.groups or self.pairs or self.nodes)

    def node_of(self, host: int) -> NetworkLink:
        """Returns a host's link."""
        return self.nodes.get(host, self.node)

    def among(self, ranks: Sequence[int]) -> Network:
        """Returns the part of the network used by a group of these ranks; group rank r is ranks[r]."""
        index = {rank: number for number, rank in enumerate(ranks)}
        kept = [number for number, host in enumerate(self.hosts) if any(rank in index for rank in host)]
        new = {host: number for number, host in enumerate(kept)}
        groups = (
            replace(group, hosts=tuple(new[host] for host in group.hosts if host in new)) for group in self.groups
        )
        return replace(
            self,
            hosts=tuple(tuple(sorted(index[rank] for rank in self.hosts[host] if rank in index)) for host in kept),
            groups=tuple(group for group in groups if group.hosts),
            pairs={(new[a], new[b]): link for (a, b), link in self.pairs.items() if a in new and b in new},
            nodes={new[host]: link for host, link in self.nodes.items() if host in new},
        )

    def cost_model(self) -> CostModel:
        """Returns the cost model for closed-form expressions, with the worst latency and rate between hosts."""
        if len(self.hosts) == 1:
            return CostModel(self.within_host.cost, self.within_host.cost, self.gamma_s_per_byte)
        used = [self.node_of(host).cost for host in range(len(self.hosts))]
        pairs = [link.cost for link in self.pairs.values()]
        uplinks = [group.uplink.cost for group in self.groups if len(group.hosts) < len(self.hosts)]
        farthest = max(
            [
                max(cost.alpha_s for cost in used) + max((cost.alpha_s for cost in uplinks), default=0.0),
                *(cost.alpha_s for cost in pairs),
            ]
        )
        slowest = max(cost.beta_s_per_byte for cost in [*used, *pairs, *uplinks])
        busiest = max(cost.busy_s for cost in [*used, *pairs])
        return CostModel(self.within_host.cost, LinkCost(farthest, slowest, busiest), self.gamma_s_per_byte)


def _short(hosts: object) -> str:
    text = repr(hosts)
    return text if len(text) <= 100 else f"{text[:100]}..."


_RATES = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_links(text: str) -> dict[str, NetworkLink]:
    """Parses named links, for example `node=25gbit,0.05ms,region=1gbit,20ms,loss=0.1%`.

    Each name is followed by a rate (kbit, mbit or gbit per second) and optionally by a latency (us, ms or s) and, after
    `loss=`, the percentage of lost packets; both default to 0.

    Raises:
        ValueError: a part of the text is malformed, a link has no rate, or a number is out of range.
    """
    parts: dict[str, dict[str, float]] = {}
    current: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if equals and name != "loss":
            current = parts.setdefault(name, {})
            part = value
        current.update(_quantity(part))
    for name, values in parts.items():
        if "bytes_per_s" not in values:
            raise ValueError(f"the link {name!r} in {text!r} has no rate: specify one, such as {name}=25gbit,0.05ms")
        is_link = 0 < values["bytes_per_s"] < math.inf and 0 <= values.get("latency_s", 0.0) < math.inf
        if not is_link or not 0 <= values.get("loss", 0.0) < 1:
            raise ValueError(
                f"the link {name!r} in {text!r} must have a rate above 0, a latency of at least 0, and a loss from 0% "
                f"to below 100%, such as {name}=25gbit,0.05ms"
            )
    if not parts:
        raise ValueError(f"{text!r} specifies no link: specify one, such as node=25gbit,0.05ms")
    return {
        name: NetworkLink(values.get("latency_s", 0.0), values["bytes_per_s"], values.get("loss", 0.0))
        for name, values in parts.items()
    }


def _quantity(part: str) -> dict[str, float]:
    _, equals, value = part.partition("=")
    try:
        if equals:
            return {"loss": float(value.removesuffix("%")) / 100}
        for key, units in (("bytes_per_s", _RATES), ("latency_s", _TIMES)):
            for unit, scale in units.items():
                if part.lower().endswith(unit):
                    return {key: float(part[: -len(unit)]) * scale}
    except ValueError:
        pass
    raise ValueError(f"{part!r} is neither a rate like 25gbit, nor a latency like 0.05ms, nor a loss like loss=0.1%")


Pair: TypeAlias = tuple[int, int]
"""The numbers of two hosts, the lower one first."""

_SLOW_FRACTION = 0.5  # a link is slow below this fraction of the expected rate; equal links rarely differ so much


def round_robin_rounds(n: int) -> list[list[Pair]]:
    """Returns n - 1 rounds (n if n is odd) of disjoint pairs of n hosts; each pair occurs in exactly one round.

    All hosts except the first rotate on a circle, as in round-robin tournaments.
    """
    circle = list(range(n)) + [-1] * (n % 2)  # -1 is a dummy; its partner is idle in this round
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def describe_differences(n: int, measured: Mapping[Pair, NetworkLink]) -> str:
    """Returns the network of n hosts in the format of PACELINE_NETWORK, or "" if links are equal or match no pattern.

    The recognized patterns are slow links of individual hosts, uplinks of racks, and slow links between a few pairs.

    Args:
        n: the number of hosts.
        measured: the link of each pair as measured in `round_robin_rounds`.
    """
    fastest = [max(link.bytes_per_s for pair, link in measured.items() if host in pair) for host in range(n)]
    usual = median_high(fastest)
    own = [rate if rate < _SLOW_FRACTION * usual else usual for rate in fastest]
    thin = {
        pair for pair, link in measured.items() if link.bytes_per_s < _SLOW_FRACTION * min(own[pair[0]], own[pair[1]])
    }
    slow_hosts = [host for host in range(n) if own[host] < usual]
    if n < 3 or not (thin or slow_hosts):
        return ""
    near_s = median(link.latency_s for pair, link in measured.items() if pair not in thin)
    found: dict[str, object] = {"node": _format_link(NetworkLink(near_s, usual))}
    if slow_hosts:
        found["nodes"] = {str(host): _format_link(_link_of(host, own[host], measured)) for host in slow_hosts}
    racks = _racks(n, thin)
    if len(racks) > 1:
        found["groups"] = {
            f"rack{number}": [rack, _format_link(_uplink(n, rack, measured, near_s))]
            for number, rack in enumerate(racks)
        }
    elif len(thin) > n // 2:
        return ""
    elif thin:
        found["pairs"] = {f"{one}-{other}": _format_link(measured[one, other]) for one, other in sorted(thin)}
    return json.dumps(found)


def _link_of(host: int, bytes_per_s: float, measured: Mapping[Pair, NetworkLink]) -> NetworkLink:
    return NetworkLink(min(link.latency_s for pair, link in measured.items() if host in pair), bytes_per_s)


def _racks(n: int, thin: set[Pair]) -> list[list[int]]:
    """Divides the hosts into groups between which all links are slow; returns a single group if this is impossible."""
    racks: list[list[int]] = []
    for host in range(n):
        near = [rack for rack in racks if any((other, host) not in thin for other in rack)]
        racks = [rack for rack in racks if rack not in near] + [sorted([host, *(h for rack in near for h in rack)])]
    if any(pair in thin for rack in racks for pair in combinations(rack, 2)):
        return [list(range(n))]
    return sorted(racks)


def _uplink(n: int, rack: Sequence[int], measured: Mapping[Pair, NetworkLink], near_s: float) -> NetworkLink:
    """Returns a rack's uplink.

    In each measured round, the rates of the pairs with exactly one host in the rack are added. The rate of the uplink
    is the largest of these sums.
    """

    def leaving(pairs: Sequence[Pair]) -> Iterator[NetworkLink]:
        return (measured[pair] for pair in pairs if (pair[0] in rack) != (pair[1] in rack))

    most = max(sum(link.bytes_per_s for link in leaving(pairs)) for pairs in round_robin_rounds(n))
    far_s = median(link.latency_s for link in leaving(list(measured)))
    return NetworkLink(max(0.0, far_s - near_s), most)


def _format_link(link: NetworkLink) -> str:
    return f"{link.bytes_per_s * 8 / 1e3:.0f}kbit,{link.latency_s * 1e6:.1f}us"
