"""Synthesis of all-reduce schedules for networks with unequal links, their verification, and selection by simulation.

`pack` packs trees into the network: each part of a tensor is summed along one tree and distributed along another.
`synthesized_all_reduce` converts the transfers along the trees to steps for each rank. If all hosts have the same
number of ranks, the l-th ranks on all hosts run the trees on the l-th slice of the tensor; rings within the hosts
reduce the slices beforehand and distribute them afterward, as in `hierarchical.py`. If the numbers of ranks differ, the
leaders run the trees on the whole tensor.

The hosts' contributions to a part are sent up a tree to the root, and the sum is sent down another tree. Every hop
occupies each link on its path for some time, so the most loaded link determines how long an all-reduce of a long tensor
takes. A ring is also a packing, in which part i is passed around to host i, and then around again.

The search for a packing begins with the best ring. Then each part in turn is removed and added again along the trees
that increase the loads the least. A tree grows host by host, always by the cheapest hop; a link becomes more expensive
the more it is used (as in Garg and Könemann 2007, "Faster and simpler algorithms for multicommodity flow and other
fractional packing problems").

Connections that share the uplink of a rack also compete for it, fill its queue and lose packets; the loads do not
include these effects. Therefore the search also produces a packing in which all traffic over an uplink passes through
one host of the group.

All hosts perform the transfers in the same order. Messages between two ranks are sequential, so a message that must
wait delays all later ones, and the order determines how long links are idle. Two orders are available: `by_level` sorts
by the number of previous hops, and `by_begin` follows a plan in which each link performs one transfer at a time, always
the transfer that can begin first (list scheduling; Graham 1966, "Bounds for certain multiprocessing anomalies").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise, permutations
from typing import NamedTuple, TypeAlias

from paceline.comm.schedule import ring, tree
from paceline.comm.schedule.algorithms import (
    SYNTHESIZED,
    AlgorithmChoice,
    AlgorithmPrediction,
    PreferredAlgorithm,
    algorithms_offering,
    build,
    forced_or_best,
)
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.simulation import CallTiming, LinkDirection, find_path, simulate_schedules
from paceline.comm.schedule.steps import (
    Buffer,
    BufferSlice,
    Operation,
    RankTopology,
    Schedule,
    Step,
    combine,
    find_host_position,
    receive,
    send,
)
from paceline.comm.schedule.verify import verify

PARTS_OF_A_HOST = 6
"""The number of parts per host into which a tensor is divided."""

MOST_HOSTS = 8
DETOURS = (2.0, 1.25, 1.0)
"""Values to try for the argument `detour` of `pack`; the best one depends on the network."""
_ROUNDS = 8
_MOST_ORDERS = 720

Hop: TypeAlias = tuple[int, int]


class Trees(NamedTuple):
    """The hops between hosts along which contributions to a part travel to `root` and the sum travels to all hosts.

    The hops of each tree are listed in an order in which they can be performed.
    """

    root: int
    up: tuple[Hop, ...]
    down: tuple[Hop, ...]


class Packing(NamedTuple):
    """The trees for each part (all parts have the same length), and the duration in seconds per byte of the tensor."""

    parts: tuple[Trees, ...]
    s_per_byte: float


def pack(network: Network, detour: float = DETOURS[0], *, through_gateways: bool = False) -> Packing:
    """Returns the best packing found for the hosts in a network, with equal parts next to each other.

    Args:
        detour: the factor by which a hop must be cheaper than the reverse of a hop in the other tree to be preferred
            over it.
        through_gateways: whether only one host of each group exchanges data with other groups.

    Raises:
        ValueError: there are more than `MOST_HOSTS` hosts.
    """
    if len(network.hosts) > MOST_HOSTS:
        raise ValueError(
            f"finding trees for {len(network.hosts)} hosts would take too long: at most {MOST_HOSTS} are supported"
        )
    loads = _Loads(network, detour)
    parts = _best_ring(loads)
    best, least = list(parts), loads.most()
    if through_gateways:
        loads.allowed = {hop for hop in loads.hops if _is_among_gateways(network, hop)}
        least = math.inf  # not the ring's load, since the ring may contain hops that are not allowed
    for _ in range(_ROUNDS):
        for number, trees in enumerate(parts):
            loads.add(trees, -1)
            parts[number] = _grow_best(loads)
        if loads.most() < least * (1 - 1e-9):
            best, least = list(parts), loads.most()
    return Packing(tuple(sorted(best)), least)


def hop_costs(network: Network, n_parts: int) -> dict[Hop, list[tuple[int, float]]]:
    """Returns, for each hop, the indices of its links and the time for which the hop occupies each link.

    The time is in seconds per byte of a tensor that consists of `n_parts` parts, one of which travels along the hop.
    """
    numbers: dict[LinkDirection, int] = {}
    costs: dict[Hop, list[tuple[int, float]]] = {}
    # The ranks on a host send their slices of a part at the same time, so one rank represents all of them.
    leaders = [host[0] for host in network.hosts]
    for source, target in permutations(range(len(leaders)), 2):
        path = find_path(network, leaders[source], leaders[target])
        costs[source, target] = [
            (numbers.setdefault(way, len(numbers)), path.weight / n_parts / min(rate, path.most))
            for way, rate in path.ways
        ]
    return costs


def _is_among_gateways(network: Network, hop: Hop) -> bool:
    """Returns True if a hop is within a group or connects the fastest hosts of two groups."""
    own, other = (network.group_of.get(host) for host in hop)
    return own == other or all(_gateway(network, host) == host for host in hop)


def _gateway(network: Network, host: int) -> int:
    group = network.group_of.get(host)
    if group is None:
        return host
    return min(network.groups[group].hosts, key=lambda member: (-network.node_of(member).bytes_per_s, member))


class _Loads:
    """The time for which the parts occupy each link, in seconds per byte of the tensor."""

    def __init__(self, network: Network, detour: float) -> None:
        self.detour = detour
        self.n = len(network.hosts)
        self.hops = hop_costs(network, self.n * PARTS_OF_A_HOST)
        self.loads = [0.0] * (1 + max(link for links in self.hops.values() for link, _ in links))
        self.unit = 1.0
        self.allowed: Set[Hop] = set(self.hops)  # the hops that trees may contain

    def most(self) -> float:
        return max(self.loads)

    def add(self, trees: Trees, times: int = 1) -> None:
        for hop in (*trees.up, *trees.down):
            self.take(hop, times)

    def take(self, hop: Hop, times: int = 1) -> None:
        for link, seconds in self.hops[hop]:
            self.loads[link] += times * seconds

    def price(self, hop: Hop) -> float:
        """Returns the increase in the sum of all loads' eighth powers, which the largest loads dominate."""
        return sum(
            _eighth_power((self.loads[link] + seconds) / self.unit) - _eighth_power(self.loads[link] / self.unit)
            for link, seconds in self.hops[hop]
        )


def _eighth_power(value: float) -> float:
    """Computes the eighth power by multiplication, so that the result is bitwise equal on all machines."""
    square = value * value
    fourth = square * square
    return fourth * fourth


def _best_ring(loads: _Loads) -> list[Trees]:
    """Adds the parts of the least loaded ring; tries all orders of the hosts, or some of them if there are many."""
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
    found = []
    for index, root in enumerate(order):
        after = (*order[index + 1 :], *order[:index])
        found.append(Trees(root, tuple(pairwise((*after, root))), tuple(pairwise((root, *after)))))
    return found


def _grow_best(loads: _Loads) -> Trees:
    """Tries all roots for a part, adds the best trees, and returns them."""
    before = list(loads.loads)
    found: tuple[float, Trees, list[float]] | None = None
    for candidate in range(loads.n):
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
    """Returns the hops of a tree, directed away from the root; if `up` is True, data is sent in the opposite direction.

    Hops in `back`, which reverse the hops of another tree, are preferred to others that cost slightly less, because a
    host then receives in the same order and at the same rate as it has sent.
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
    """A transfer of a sum or a contribution along a hop; `is_last` marks the last contribution to a part."""

    part: int
    source: int
    target: int
    is_sum: bool
    is_last: bool


def by_begin(network: Network, parts: Sequence[Trees]) -> list[TreeTransfer]:
    """Returns the transfers of all parts in the order in which they would begin in the plan."""
    costs = hop_costs(network, len(parts))
    free: dict[int, float] = {}
    # `left` holds the remaining transfers of each part in a feasible order; `ready` holds the times at which hosts have
    # the part's data.
    left = [list(_part_transfers(number, trees)) for number, trees in enumerate(parts)]
    ready: list[dict[int, float]] = [{} for _ in parts]
    arranged: list[TreeTransfer] = []

    def begins_s(transfer: TreeTransfer) -> float:
        links = costs[transfer.source, transfer.target]
        return max(ready[transfer.part].get(transfer.source, 0.0), *(free.get(link, 0.0) for link, _ in links))

    while any(left):
        candidates = [transfer for transfers in left for transfer in _possible(transfers)]
        chosen = min(candidates, key=lambda transfer: (begins_s(transfer), transfer))
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
    """Returns the transfers of all parts, sorted by the number of transfers on which they depend."""
    levels: dict[TreeTransfer, int] = {}
    for number, trees in enumerate(parts):
        reached: dict[int, int] = {}
        for transfer in _part_transfers(number, trees):
            levels[transfer] = reached.get(transfer.source, 0)
            reached[transfer.target] = max(reached.get(transfer.target, 0), levels[transfer] + 1)
    return _with_last(sorted(levels, key=lambda transfer: (levels[transfer], transfer)), parts)


def _part_transfers(part: int, trees: Trees) -> Iterator[TreeTransfer]:
    for is_sum, hops in ((False, trees.up), (True, trees.down)):
        yield from (TreeTransfer(part, source, target, is_sum, False) for source, target in hops)


def _possible(transfers: Sequence[TreeTransfer]) -> Iterator[TreeTransfer]:
    """Yields the transfers that do not depend on another remaining transfer."""
    summing = any(not transfer.is_sum for transfer in transfers)
    current = [transfer for transfer in transfers if transfer.is_sum != summing]
    awaiting = {transfer.target for transfer in current}
    return (transfer for transfer in current if transfer.source not in awaiting)


def _with_last(arranged: Sequence[TreeTransfer], parts: Sequence[Trees]) -> list[TreeTransfer]:
    """Marks the last contribution that reaches the root of each part."""
    last = {
        transfer.part: number
        for number, transfer in enumerate(arranged)
        if not transfer.is_sum and transfer.target == parts[transfer.part].root
    }
    return [transfer._replace(is_last=last.get(transfer.part) == number) for number, transfer in enumerate(arranged)]


MOST_RANKS = 64
"""The maximum number of ranks for which the schedules can be verified in less than a second."""

_LONG_NBYTES = 16 << 20
_NEARLY = 1.25  # prefer an algorithm with a much lighter load if it takes at most this multiple of the shortest time
_COMPETING = 1.05  # factor applied to the simulated duration if several connections may share an uplink
_LIGHTER = 0.75  # a load counts as "much lighter" if it is at most this fraction of the fastest algorithm's load
_AS_FAST = 1.02  # prefer an algorithm with fewer messages if it takes at most this multiple of the shortest time


def synthesized_all_reduce(topology: RankTopology, transfers: Sequence[TreeTransfer]) -> Schedule:
    """Returns the schedule that performs the transfers between the hosts of `topology`, for the topology's rank."""
    _, host, local, me = home = find_host_position(topology)
    n_local, n_parts = len(local), 1 + max(transfer.part for transfer in transfers)
    if home.is_even:
        slices = [[BufferSlice(Buffer.OUTPUT, owner * n_parts, n_parts)] for owner in range(n_local)]
        steps = ring.reduce_phase(local, me, slices, slices, final=False)
        steps += _transfer_steps(transfers, home.rail, host, me * n_parts)
        steps += ring.gather_phase(local, me, slices)
        return Schedule(
            Operation.ALL_REDUCE, SYNTHESIZED, topology.rank, topology.world_size, -1, n_local * n_parts, tuple(steps)
        )
    tensor = BufferSlice(Buffer.OUTPUT, 0, n_parts)
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += _transfer_steps(transfers, home.rail, host, 0)
    steps += tree.broadcast_phase(local, me, tensor)
    return Schedule(Operation.ALL_REDUCE, SYNTHESIZED, topology.rank, topology.world_size, -1, n_parts, tuple(steps))


def _transfer_steps(transfers: Sequence[TreeTransfer], members: Sequence[int], host: int, first: int) -> list[Step]:
    """Returns the steps of members[host]. All members use the same order of transfers, so there are no deadlocks."""
    steps: list[Step] = []
    for transfer in transfers:
        block = BufferSlice(Buffer.OUTPUT, first + transfer.part)
        if transfer.source == host:
            steps.append(send(members[transfer.target], block))
        elif transfer.target == host and transfer.is_sum:
            steps.append(receive(members[transfer.source], block))
        elif transfer.target == host:
            steps.append(combine(members[transfer.source], block, block, transfer.is_last))
    return steps


def can_synthesize(network: Network) -> bool:
    """Returns True if some links differ and there are few enough hosts and ranks for synthesis."""
    uneven = bool(network.groups or network.pairs or network.nodes)
    return uneven and 1 < len(network.hosts) <= MOST_HOSTS and network.world_size <= MOST_RANKS


def synthesize(network: Network) -> list[Schedule]:
    """Returns verified all-reduce schedules for all ranks in a network.

    The schedules use the packing and the order of transfers that are the fastest in a simulation with a long tensor;
    packings through gateways are preferred if they are only slightly slower. For the same network, the schedules are
    the same on every machine.

    Raises:
        ScheduleError: the schedules are wrong, which indicates a bug in Paceline.
    """
    n = network.world_size
    found: list[tuple[float, list[Schedule]]] = []
    for through_gateways in (False, True) if network.groups else (False,):
        for detour in DETOURS:
            parts = pack(network, detour, through_gateways=through_gateways).parts
            for transfers in (by_level(parts), by_begin(network, parts)):
                world = [
                    synthesized_all_reduce(RankTopology(rank, n, -1, network.hosts), transfers) for rank in range(n)
                ]
                seconds = simulate_schedules(world, network, _LONG_NBYTES).seconds
                found.append((seconds if through_gateways else seconds * _COMPETING, world))
    _, fastest = min(found, key=lambda each: each[0])
    verify(fastest)
    return fastest


def choose_all_reduce(
    network: Network, schedules: Sequence[Schedule], nbytes: int, forced: str | None = None
) -> AlgorithmChoice:
    """Selects the best algorithm for an all-reduce of `nbytes` bytes by simulation, or returns `forced`.

    The fastest algorithm is chosen unless another one is nearly as fast and loads its busiest link much less, or is
    equally fast with no more load on that link and fewer messages. The simulation ignores some effects, such as a core
    that serves many connections, or a queue that overflows. These effects grow with the load of a link and with the
    number of messages.
    """
    n = network.world_size
    worlds = {SYNTHESIZED: schedules}
    for name in algorithms_offering(Operation.ALL_REDUCE):
        worlds[name] = [build(name, Operation.ALL_REDUCE, rank, n, -1, network.hosts) for rank in range(n)]
    timings = {name: simulate_schedules(world, network, nbytes) for name, world in worlds.items()}
    times = (AlgorithmPrediction(name, timing.seconds) for name, timing in timings.items())
    candidates = tuple(sorted(times, key=lambda each: each.seconds))
    most = {name: _most_nbytes(timing) for name, timing in timings.items()}
    messages = {name: max(len(rank.steps) for rank in world) for name, world in worlds.items()}
    hosts = len(network.hosts)
    preferred = _preferred(candidates, most, messages)
    return forced_or_best(Operation.ALL_REDUCE, nbytes, n, hosts, candidates, forced, preferred)


def _preferred(
    candidates: Sequence[AlgorithmPrediction], most: Mapping[str, float], messages: Mapping[str, int]
) -> PreferredAlgorithm | None:
    """Returns an algorithm that is nearly as fast as the first candidate and better in other respects, or None.

    Args:
        candidates: the algorithms from the fastest to the slowest.
        most: the number of bytes on the busiest link for each algorithm.
        messages: the maximum number of steps on any rank for each algorithm.
    """
    seconds, nbytes = candidates[0].seconds, most[candidates[0].algorithm]
    for candidate in candidates:
        if candidate.seconds <= _NEARLY * seconds and most[candidate.algorithm] <= _LIGHTER * nbytes:
            return PreferredAlgorithm(candidate, "sends less over its busiest link")
    alike = [
        candidate
        for candidate in candidates
        if candidate.seconds <= _AS_FAST * seconds and most[candidate.algorithm] <= nbytes * (1 + 1e-9)
    ]
    fewest = min(alike, key=lambda each: messages[each.algorithm])
    return PreferredAlgorithm(fewest, "has fewer messages") if fewest != candidates[0] else None


def _most_nbytes(timing: CallTiming) -> float:
    """Returns the number of bytes on the busiest host link."""
    return max((nbytes for name, nbytes in timing.bytes_per_link.items() if name.startswith("host ")), default=0.0)
