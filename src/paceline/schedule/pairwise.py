"""Finds out which links of a network differ, from what every pair of hosts has measured between its two.

The pairs take turns as in a tournament, so that as many as possible measure at once: what two pairs share, such as the
uplink of a rack, then shows in the rates of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median, median_high
from typing import TypeAlias

from paceline.schedule.network import Link

Pair: TypeAlias = tuple[int, int]
"""Two hosts by their numbers, the lower one first."""

_SLOW = 0.5  # of the rate that is expected; measured rates of equal links differ by less, or not again and again


def tournament(n: int) -> list[list[Pair]]:
    """Returns rounds of disjoint pairs of n hosts, in which each pair comes once: n - 1 of them, or n if n is odd.

    All hosts but the first turn around a circle, as in round-robin tournaments.
    """
    circle = list(range(n)) + [-1] * (n % 2)  # whom -1 meets has a rest
    rounds = []
    for _ in range(len(circle) - 1):
        meeting = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in meeting if min(pair) >= 0])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def describe_differences(n: int, measured: Mapping[Pair, Link]) -> str:
    """Returns the network of n hosts as PACELINE_NETWORK says it; "" if all links are alike, or follow no rule.

    What differs may be the links of single hosts, the uplinks of racks, or what a few pairs have between them.

    Args:
        n: the number of hosts.
        measured: the link of each pair as it was measured in `tournament`.
    """
    fastest = [max(link.bytes_per_s for pair, link in measured.items() if host in pair) for host in range(n)]
    usual = median_high(fastest)
    own = [rate if rate < _SLOW * usual else usual for rate in fastest]
    thin = {pair for pair, link in measured.items() if link.bytes_per_s < _SLOW * min(own[pair[0]], own[pair[1]])}
    slow_hosts = [host for host in range(n) if own[host] < usual]
    if n < 3 or not (thin or slow_hosts):
        return ""
    near_s = median(link.latency_s for pair, link in measured.items() if pair not in thin)
    found: dict[str, object] = {"node": _spelt(Link(near_s, usual))}
    if slow_hosts:
        found["nodes"] = {str(host): _spelt(_link_of(host, own[host], measured)) for host in slow_hosts}
    racks = _racks(n, thin)
    if len(racks) > 1:
        found["groups"] = {
            f"rack{number}": [rack, _spelt(_uplink(n, rack, measured, near_s))] for number, rack in enumerate(racks)
        }
    elif len(thin) > n // 2:
        return ""
    elif thin:
        found["pairs"] = {f"{one}-{other}": _spelt(measured[one, other]) for one, other in sorted(thin)}
    return json.dumps(found)


def _link_of(host: int, bytes_per_s: float, measured: Mapping[Pair, Link]) -> Link:
    return Link(min(link.latency_s for pair, link in measured.items() if host in pair), bytes_per_s)


def _racks(n: int, thin: set[Pair]) -> list[list[int]]:
    """Returns the groups of hosts that only thin links join; a single one if the thin links do not divide them."""
    racks: list[list[int]] = []
    for host in range(n):
        near = [rack for rack in racks if any((other, host) not in thin for other in rack)]
        racks = [rack for rack in racks if rack not in near] + [
            sorted([host, *(each for rack in near for each in rack)])
        ]
    if any(pair in thin for rack in racks for pair in combinations(rack, 2)):
        return [list(range(n))]
    return sorted(racks)


def _uplink(n: int, rack: Sequence[int], measured: Mapping[Pair, Link], near_s: float) -> Link:
    """Returns the uplink of a rack: the most that pairs which leave it carried together in any round."""

    def leaving(pairs: Sequence[Pair]) -> Iterator[Link]:
        return (measured[pair] for pair in pairs if (pair[0] in rack) != (pair[1] in rack))

    most = max(sum(link.bytes_per_s for link in leaving(pairs)) for pairs in tournament(n))
    far_s = median(link.latency_s for link in leaving(list(measured)))
    return Link(max(0.0, far_s - near_s), most)


def _spelt(link: Link) -> str:
    return f"{link.bytes_per_s * 8 / 1e3:.0f}kbit,{link.latency_s * 1e6:.1f}us"
