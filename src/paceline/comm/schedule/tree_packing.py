"""Packs trees into a network: each part of the tensor is summed along one tree and spread along another.

The hosts' contributions to a part go up a tree to its root, and the sum goes down another one. With every hop each link
on its way gets a load, in seconds of its time, and the time of an all-reduce of a long tensor is that of the link with
the most. A ring is a packing, too: part i goes around to host i, and around once more.

The best ring is the start. Then part after part is taken out and put back with the trees that raise the loads least: a
tree grows host by host, by the hop that costs least, where a link's time costs more the more of it is taken (as in
Garg and Könemann 2007, "Faster and simpler algorithms for multicommodity flow and other fractional packing problems").

Connections that share the uplink of a rack also compete for it, fill its queue and lose packets, which no load shows.
So there is a packing, too, in which all that crosses an uplink goes through one host of the group.

Puts the transfers of packed trees into an order, in which all hosts take them.

Messages of two ranks follow one another. So a message that must wait holds up those behind it, and the order decides
how much of their time the links are idle. There are two orders to choose from: by the number of hops before, and that
of a plan in which each link does one transfer at a time, and of those that could begin, the earliest comes next (list
scheduling; Graham 1966, "Bounds for certain multiprocessing anomalies").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise, permutations
from typing import NamedTuple, TypeAlias

from paceline.comm.schedule.network import Network
from paceline.comm.schedule.simulation import LinkDirection, find_path

PARTS_OF_A_HOST = 6
"""The tensor is cut into so many parts for each host."""

MOST_HOSTS = 8
DETOURS = (2.0, 1.25, 1.0)
"""A way back is also taken if another is cheaper by this factor; which one is better depends on the network."""
_ROUNDS = 8
_MOST_ORDERS = 720

Hop: TypeAlias = tuple[int, int]


class Trees(NamedTuple):
    """The hops, from host to host, by which the contributions to a part reach `root`, and the sum all hosts.

    Each tree's hops are in an order in which they can be done.
    """

    root: int
    up: tuple[Hop, ...]
    down: tuple[Hop, ...]


class Packing(NamedTuple):
    """The trees of each part, all of which are equally long, and the seconds that a byte of the tensor takes."""

    parts: tuple[Trees, ...]
    s_per_byte: float


def pack(network: Network, detour: float = DETOURS[0], *, through_gateways: bool = False) -> Packing:
    """Returns the best packing that was found for the hosts of a network, equal parts next to each other.

    Args:
        network: the hosts and their links.
        detour: by how much a part's way back to a host is preferred to be the way that it came.
        through_gateways: whether only one host of each group sends to other groups and receives from them.

    Raises:
        ValueError: there are more than `MOST_HOSTS` hosts.
    """
    if len(network.hosts) > MOST_HOSTS:
        raise ValueError(f"trees for {len(network.hosts)} hosts would take too long to find: {MOST_HOSTS} are the most")
    loads = _Loads(network, detour)
    parts = _best_ring(loads)
    best, least = list(parts), loads.most()
    if through_gateways:
        loads.allowed = {hop for hop in loads.hops if _is_among_gateways(network, hop)}
        least = math.inf  # the ring may use other hops
    for _ in range(_ROUNDS):
        for number, trees in enumerate(parts):
            loads.add(trees, -1)
            parts[number] = _grow_best(loads, number % len(network.hosts))
        if loads.most() < least * (1 - 1e-9):
            best, least = list(parts), loads.most()
    return Packing(tuple(sorted(best)), least)


def hop_costs(network: Network, n_parts: int) -> dict[Hop, list[tuple[int, float]]]:
    """Returns for each hop the links that it uses, by number, and the seconds that it takes of them for each byte.

    The bytes are those of a tensor of so many parts, of which one makes the hop.
    """
    numbers: dict[LinkDirection, int] = {}
    found: dict[Hop, list[tuple[int, float]]] = {}
    # The ranks of a host send their slices of a part at the same time, so that one of them stands for all.
    leaders = [host[0] for host in network.hosts]
    for source, target in permutations(range(len(leaders)), 2):
        crossing = find_path(network, leaders[source], leaders[target])
        found[source, target] = [
            (numbers.setdefault(way, len(numbers)), crossing.weight / n_parts / min(rate, crossing.most))
            for way, rate in crossing.ways
        ]
    return found


def _is_among_gateways(network: Network, hop: Hop) -> bool:
    """Returns whether a hop stays within a group, or is one between the fastest hosts of two groups."""
    own, other = (network.group_of.get(host) for host in hop)
    return own == other or all(_gateway(network, host) == host for host in hop)


def _gateway(network: Network, host: int) -> int:
    group = network.group_of.get(host)
    if group is None:
        return host
    return min(network.groups[group].hosts, key=lambda each: (-network.node_of(each).bytes_per_s, each))


class _Loads:
    """The seconds of each link's time that the parts so far take for each byte of the tensor."""

    def __init__(self, network: Network, detour: float) -> None:
        self.detour = detour
        self.n = len(network.hosts)
        self.hops = hop_costs(network, self.n * PARTS_OF_A_HOST)
        self.loads = [0.0] * (1 + max(link for links in self.hops.values() for link, _ in links))
        self.unit = 1.0
        self.allowed: Set[Hop] = set(self.hops)  # in which trees may grow

    def most(self) -> float:
        return max(self.loads)

    def add(self, trees: Trees, times: int = 1) -> None:
        for hop in (*trees.up, *trees.down):
            self.take(hop, times)

    def take(self, hop: Hop, times: int = 1) -> None:
        for link, seconds in self.hops[hop]:
            self.loads[link] += times * seconds

    def price(self, hop: Hop) -> float:
        """Returns how much the sum of the eighth powers of all loads would grow, which is that of the largest ones."""
        return sum(
            _eighth_power((self.loads[link] + seconds) / self.unit) - _eighth_power(self.loads[link] / self.unit)
            for link, seconds in self.hops[hop]
        )


def _eighth_power(value: float) -> float:
    """Returns the power by products only, which have the same bits on all machines."""
    square = value * value
    fourth = square * square
    return fourth * fourth


def _best_ring(loads: _Loads) -> list[Trees]:
    """Adds the parts of the ring with the least load, of all orders of the hosts or, if they are many, of some."""
    found: tuple[float, list[Trees]] | None = None
    for order in _orders(loads.n):
        loads.loads = [0.0] * len(loads.loads)
        parts = [part for part in _ring(order) for _ in range(PARTS_OF_A_HOST)]
        for part in parts:
            loads.add(part)
        if found is None or loads.most() < found[0] * (1 - 1e-9):
            found = loads.most(), parts
    assert found is not None
    loads.loads = [0.0] * len(loads.loads)
    for part in found[1]:
        loads.add(part)
    loads.unit = found[0] or 1.0
    return found[1]


def _orders(n: int) -> Iterator[tuple[int, ...]]:
    for number, rest in enumerate(permutations(range(1, n))):
        if number == _MOST_ORDERS:
            return
        yield 0, *rest


def _ring(order: Sequence[int]) -> list[Trees]:
    n = len(order)
    found = []
    for at, root in enumerate(order):
        around = [order[(at + turn) % n] for turn in range(1, n + 1)]  # ends at the root
        up = tuple(pairwise(around))
        around = [order[(at + turn) % n] for turn in range(n)]
        found.append(Trees(root, up, tuple(pairwise(around))))
    return found


def _grow_best(loads: _Loads, root: int) -> Trees:
    """Adds trees for a part, of any root if the hosts are few, and returns them."""
    roots = range(loads.n) if loads.n <= 8 else [root]
    before = list(loads.loads)
    found: tuple[float, Trees, list[float]] | None = None
    for candidate in roots:
        loads.loads = list(before)
        up = tuple((target, source) for source, target in reversed(_grow(loads, candidate, up=True)))
        trees = Trees(candidate, up, tuple(_grow(loads, candidate, up=False, back=set(up))))
        price = sum(_eighth_power(load / loads.unit) for load in loads.loads)
        if found is None or price < found[0] * (1 - 1e-12):
            found = price, trees, loads.loads
    assert found is not None
    loads.loads = found[2]
    return found[1]


def _grow(loads: _Loads, root: int, *, up: bool, back: Set[Hop] = frozenset()) -> list[Hop]:
    """Returns the hops of a tree away from the root. If it leads `up` to it, the data goes against them.

    Hops that lead `back` along those of another tree are preferred to others that cost a little less: what a host
    gets then comes in the order and at the rate at which it has sent.
    """

    def price(hop: Hop) -> float:
        return loads.price(hop) * (1 if (hop[1], hop[0]) in back else loads.detour)

    depth: dict[int, int] = {root: 0}
    hops: list[Hop] = []
    while len(depth) < loads.n:
        _, _, inside, outside = min(
            (price((outside, inside) if up else (inside, outside)), depth[inside], inside, outside)
            for inside in depth
            for outside in range(loads.n)
            if outside not in depth and (inside, outside) in loads.allowed
        )
        loads.take((outside, inside) if up else (inside, outside))
        depth[outside] = depth[inside] + 1
        hops.append((inside, outside))
    return hops


class TreeTransfer(NamedTuple):
    """A hop of a part. It brings a sum or else a contribution, of which one is the last to the part."""

    part: int
    source: int
    target: int
    is_sum: bool
    is_last: bool


def by_begin(network: Network, parts: Sequence[Trees]) -> list[TreeTransfer]:
    """Returns the transfers of all parts in the order in which they would begin."""
    costs = hop_costs(network, len(parts))
    free: dict[int, float] = {}
    # For each part the transfers that are left, in an order in which they can be done, and when each host has its data.
    left = [list(_part_transfers(number, trees)) for number, trees in enumerate(parts)]
    ready: list[dict[int, float]] = [{} for _ in parts]
    arranged: list[TreeTransfer] = []

    def begins_s(each: TreeTransfer) -> float:
        hop = each.source, each.target
        return max(ready[each.part].get(each.source, 0.0), *(free.get(link, 0.0) for link, _ in costs[hop]))

    while any(left):
        candidates = [each for transfers in left for each in _possible(transfers)]
        chosen = min(candidates, key=lambda each: (begins_s(each), each))
        begin_s = begins_s(chosen)
        hop: Hop = chosen.source, chosen.target
        for link, seconds in costs[hop]:
            free[link] = begin_s + seconds
        arrives_s = begin_s + max(seconds for _, seconds in costs[hop])
        known = ready[chosen.part]
        known[chosen.target] = max(known.get(chosen.target, 0.0), arrives_s)
        left[chosen.part].remove(chosen)
        arranged.append(chosen)
    return _with_last(arranged, parts)


def by_level(parts: Sequence[Trees]) -> list[TreeTransfer]:
    """Returns the transfers of all parts in the order of how many others they follow, one after another."""
    levels: dict[TreeTransfer, int] = {}
    for number, trees in enumerate(parts):
        reached: dict[int, int] = {}
        for each in _part_transfers(number, trees):
            levels[each] = reached.get(each.source, 0)
            reached[each.target] = max(reached.get(each.target, 0), levels[each] + 1)
    return _with_last(sorted(levels, key=lambda each: (levels[each], each)), parts)


def _part_transfers(part: int, trees: Trees) -> Iterator[TreeTransfer]:
    for is_sum, hops in ((False, trees.up), (True, trees.down)):
        yield from (TreeTransfer(part, source, target, is_sum, False) for source, target in hops)


def _possible(transfers: Sequence[TreeTransfer]) -> Iterator[TreeTransfer]:
    """Yields those that wait for no other: no other brings their source what they pass on."""
    summing = any(not each.is_sum for each in transfers)
    awaiting = {each.target for each in transfers if each.is_sum != summing}
    return (each for each in transfers if each.is_sum != summing and each.source not in awaiting)


def _with_last(arranged: Sequence[TreeTransfer], parts: Sequence[Trees]) -> list[TreeTransfer]:
    """Marks the last contribution that reaches the root of each part."""
    last = {each.part: number for number, each in enumerate(arranged) if _completes(each, parts)}
    return [each._replace(is_last=last.get(each.part) == number) for number, each in enumerate(arranged)]


def _completes(each: TreeTransfer, parts: Sequence[Trees]) -> bool:
    return not each.is_sum and each.target == parts[each.part].root
