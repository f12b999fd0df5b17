"""Event-driven simulation of a collective on a network, with the same schedules and order of steps as the executor.

`simulate_call` is the entry point. `find_path` determines the links and the latency of a message. `SimulationInput` is
the input to the core (native/simulate): programs, the routes between them, and links.

The first host represents all hosts if the network is uniform, all ranks arrive at the same time and are equally fast,
and all hosts have the same schedules (the algorithm's `ALIKE`). This is exact, because a rotation of the hosts maps the
schedules and the network onto themselves. All quantities that depend only on the schedules and the network are
therefore the same on all hosts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.comm.schedule.algorithms import ALIKE, build, wire_of
from paceline.comm.schedule.cost_model import PIPE_NBYTES
from paceline.comm.schedule.network import Network, NetworkLink, most_with_loss
from paceline.comm.schedule.steps import ROOTED, Operation, Schedule, StepKind, flatten

MOST_STEPS = 30_000_000
"""The maximum number of steps, summed over all ranks, for which the simulation fits in memory."""


@dataclass(frozen=True)
class LinkDirection:
    """One direction of a link that belongs to a rank within its host, to a host, to a group, or to a pair of hosts."""

    kind: str
    number: int
    direction: str
    other: int = -1

    def name(self, network: Network) -> str:
        """Returns a name for error messages, such as `host 3 up`, `hosts 1-2` or `rack0 down`."""
        if self.kind == "hosts":
            return f"hosts {self.number}-{self.other}"
        owner = network.groups[self.number].name if self.kind == "group" else f"{self.kind} {self.number}"
        return f"{owner} {self.direction}"


@dataclass(frozen=True)
class MessagePath:
    """The path of a message.

    Attributes:
        latency_s: the time from the departure of a byte to its arrival, in seconds.
        overhead_s: the time for which the message occupies its sender and its receiver, in seconds.
        most: the maximum rate of one connection, in bytes per second.
        weight: the number of bytes that a link carries for each byte that arrives.
        ways: the links that the message crosses, with their rates in bytes per second.
    """

    latency_s: float
    overhead_s: float
    most: float
    weight: float
    ways: tuple[tuple[LinkDirection, float], ...]


def find_path(network: Network, source: int, target: int) -> MessagePath:
    """Returns the path of a message from the rank `source` to the rank `target`."""
    source_host, target_host = network.host_of[source], network.host_of[target]
    if source_host == target_host:
        link = network.within_host
        ways = (
            (LinkDirection("rank", source, "out"), link.bytes_per_s),
            (LinkDirection("rank", target, "in"), link.bytes_per_s),
        )
        return _path([link], link.latency_s, ways)
    ends = network.node_of(source_host), network.node_of(target_host)
    between = [
        (LinkDirection("host", source_host, "up"), ends[0].bytes_per_s),
        (LinkDirection("host", target_host, "down"), ends[1].bytes_per_s),
    ]
    uplinks: list[NetworkLink] = []
    groups = network.group_of.get(source_host), network.group_of.get(target_host)
    for group, direction in zip(groups, ("up", "down"), strict=True):
        if group is not None and groups[0] != groups[1]:
            uplinks.append(network.groups[group].uplink)
            between.append((LinkDirection("group", group, direction), uplinks[-1].bytes_per_s))
    latency_s = max(link.latency_s for link in ends) + max((link.latency_s for link in uplinks), default=0.0)
    own = network.pairs.get((source_host, target_host))
    if own is not None:
        between.append((LinkDirection("hosts", source_host, "", target_host), own.bytes_per_s))
        return _path([*ends, *uplinks, own], own.latency_s, tuple(between))
    return _path([*ends, *uplinks], latency_s, tuple(between))


def _path(links: list[NetworkLink], latency_s: float, ways: tuple[tuple[LinkDirection, float], ...]) -> MessagePath:
    arrives = 1.0
    for link in links:
        arrives *= 1 - link.loss
    overhead_s = max(link.overhead_s for link in links)
    return MessagePath(latency_s, overhead_s, most_with_loss(latency_s, 1 - arrives), 1 / arrives, ways)


@dataclass
class SimulationInput:
    """The input to the core's simulator. A program is a schedule that all ranks with the same representative share.

    Attributes:
        standing: a function that maps a rank to the rank that represents it.
        turned: a function of (rank, by) that applies to `rank` the rotation that maps `by` to its representative.
        blocks: the number of blocks in each schedule.
        schedules: the programs.
        speeds: the relative speed of each rank within its host, or () if all are 1.
        routes: the routes, in the format that `_core.simulate` expects.
        pairs: the source and the target rank of each route.
        ways: the index of each link.
        capacities: the rates of the links, in bytes per second.
    """

    network: Network
    standing: Callable[[int], int]
    turned: Callable[[int, int], int]
    blocks: int = 0
    schedules: list[_core.Schedule] = field(default_factory=list)
    speeds: Sequence[float] = ()
    routes: array[float] = field(default_factory=lambda: array("d"))
    pairs: list[tuple[int, int]] = field(default_factory=list)
    ways: dict[LinkDirection, int] = field(default_factory=dict)
    capacities: array[float] = field(default_factory=lambda: array("d"))

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Adds the programs, which must be in rank order."""
        for schedule in schedules:
            self.blocks = schedule.blocks
            numbers = schedule.blocks, schedule.rank, schedule.world_size
            self.schedules.append(_core.Schedule.make(0, *numbers, flatten(schedule), wire_of(schedule.algorithm)))
            for peer in dict.fromkeys(step.peer for step in schedule.steps if step.kind is StepKind.SEND):
                self._add_route(schedule.rank, peer)

    def _add_route(self, source: int, target: int) -> None:
        path = find_path(self.network, source, target)
        self.pairs.append((source, target))
        numbers = (source, target, self.standing(target), self.turned(source, target))
        self.routes.extend((*numbers, path.latency_s, path.overhead_s, path.most, len(path.ways)))
        for way, bytes_per_s in path.ways:
            self.routes.extend((self._number_of(way, bytes_per_s), path.weight))

    def _number_of(self, way: LinkDirection, bytes_per_s: float) -> int:
        way = self.stands_for(way)
        if way not in self.ways:
            self.ways[way] = len(self.ways)
            speed = self.speeds[way.number] if way.kind == "rank" and self.speeds else 1.0
            self.capacities.append(bytes_per_s * speed)
        return self.ways[way]

    def stands_for(self, way: LinkDirection) -> LinkDirection:
        """Returns the link direction that represents `way` in the simulation."""
        if way.kind == "rank":
            return LinkDirection("rank", self.standing(way.number), way.direction)
        if way.kind == "host":
            host = self.network.host_of[self.standing(self.network.hosts[way.number][0])]
            return LinkDirection("host", host, way.direction)
        return way


def full_simulation(network: Network, speeds: Sequence[float]) -> SimulationInput:
    """Returns an input in which every rank represents itself."""
    return SimulationInput(network, lambda rank: rank, lambda rank, _: rank, speeds=speeds)


def folded_simulation(network: Network) -> SimulationInput:
    """Returns an input in which the ranks of the first host represent the ranks with the same index on other hosts."""
    per_host, world_size = len(network.hosts[0]), network.world_size

    def turned(rank: int, by: int) -> int:
        return (rank - (by - by % per_host)) % world_size

    return SimulationInput(network, lambda rank: rank % per_host, turned)


@dataclass(frozen=True)
class SimulatedMessage:
    """A message, with the times at which its first byte departs and its last byte arrives, in seconds after time 0.

    `step` is the index of its SEND in the sender's schedule.
    """

    source: int
    target: int
    step: int
    nbytes: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class CallTiming:
    """The result of a simulation.

    Attributes:
        seconds: the time from the last rank's arrival until the last rank completes the call, in seconds.
        ends: the time at which each rank completes the call, in seconds after time 0.
        bytes_per_link: the number of bytes on each used link, with one entry per direction.
        transfers: all messages in the order of arrival, if they were recorded.
    """

    seconds: float
    ends: tuple[float, ...]
    bytes_per_link: Mapping[str, float]
    transfers: tuple[SimulatedMessage, ...] = ()


def simulate_call(
    algorithm: str,
    operation: Operation,
    nbytes: int,
    network: Network,
    arrivals: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    record: bool = False,
    *,
    root: int = 0,
    fold: bool = True,
) -> CallTiming:
    """Simulates a call on all ranks in a network.

    Args:
        algorithm: the name of the algorithm or, for a quantized schedule, of the wire format.
        nbytes: the size in bytes of a rank's longest buffer, as in `algorithms.predict`.
        arrivals: the time in seconds at which each rank makes the call; 0 by default.
        speeds: the relative speed at which each rank copies and reduces; 1 by default.
        record: whether to record the messages.
        root: the root, if the operation has one.
        fold: whether to let one host represent all hosts where this is exact.

    Raises:
        ValueError: the algorithm does not implement the operation, the number of arrivals or speeds differs from the
            number of ranks, or the schedules have too many steps.
    """
    n = network.world_size

    def schedule(rank: int) -> Schedule:
        return build(algorithm, operation, rank, n, root if operation in ROOTED else -1, network.hosts)

    alike = operation in ALIKE.get(algorithm, ()) and network.is_uniform and not record
    if fold and alike and len(set(arrivals or [0])) == len(set(speeds or [1])) == 1:
        return _simulate(folded_simulation(network), map(schedule, network.hosts[0]), nbytes, arrivals, speeds, record)
    steps = len(schedule(n - 1).steps) * n
    if steps > MOST_STEPS:
        raise ValueError(
            f"{algorithm} {operation} of {n:,} ranks has about {steps:,} steps, too many to simulate: choose "
            "hierarchical on equal hosts, or fewer ranks"
        )
    return simulate_schedules(map(schedule, range(n)), network, nbytes, arrivals, speeds, record)


def simulate_schedules(
    schedules: Iterable[Schedule],
    network: Network,
    nbytes: int,
    arrivals: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    record: bool = False,
) -> CallTiming:
    """Simulates a call with the given schedules, one per rank in rank order; see `simulate_call`."""
    return _simulate(full_simulation(network, speeds or ()), schedules, nbytes, arrivals, speeds, record)


def _one_per_rank(values: Sequence[float] | None, default: float, n: int) -> Sequence[float]:
    if values is not None and len(values) != n:
        raise ValueError(f"{len(values)} arrivals or speeds were given for {n} ranks: pass one for each rank")
    return values if values is not None else [default] * n


def _simulate(
    scene: SimulationInput,
    schedules: Iterable[Schedule],
    nbytes: int,
    arrivals: Sequence[float] | None,
    speeds: Sequence[float] | None,
    record: bool,
) -> CallTiming:
    network = scene.network
    arrivals = _one_per_rank(arrivals, 0.0, network.world_size)
    speeds = _one_per_rank(speeds, 1.0, network.world_size)
    scene.add(schedules)
    simulated = len(scene.schedules)
    # A block has at least one byte, which accounts for the headers of its messages.
    block_nbytes = max(1.0, nbytes / max(1, scene.blocks))
    ends, carried, transfers = _core.simulate(
        scene.schedules,
        array("d", arrivals[:simulated]).tobytes(),
        array("d", speeds[:simulated]).tobytes(),
        scene.routes.tobytes(),
        scene.capacities.tobytes(),
        block_nbytes,
        network.gamma_s_per_byte,
        PIPE_NBYTES,
        record,
    )
    return CallTiming(
        seconds=max(ends) - max(arrivals),
        ends=tuple(ends[scene.standing(rank)] for rank in range(network.world_size)),
        bytes_per_link=_by_name(scene, carried),
        transfers=tuple(
            SimulatedMessage(*scene.pairs[route], step, moved, begin_s, end_s)
            for route, step, moved, begin_s, end_s in transfers
        ),
    )


def _by_name(scene: SimulationInput, carried: Sequence[float]) -> dict[str, float]:
    """Returns the bytes on each used link by name, including links that another link represents."""
    network = scene.network
    ways = dict.fromkeys(scene.ways)
    if len(scene.schedules) < network.world_size:
        for rank in range(network.world_size):
            ways.update(dict.fromkeys((LinkDirection("rank", rank, "out"), LinkDirection("rank", rank, "in"))))
        for host in range(len(network.hosts)):
            ways.update(dict.fromkeys((LinkDirection("host", host, "up"), LinkDirection("host", host, "down"))))
    found = {way.name(network): scene.ways.get(scene.stands_for(way)) for way in ways}
    return {name: carried[number] for name, number in found.items() if number is not None}
