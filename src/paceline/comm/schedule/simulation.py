"""The interface of the simulation: how long a call takes, and who sends what to whom meanwhile.

Which links a message between two ranks crosses, and what they do to it.

Lays out what the core simulates: programs, the routes between them, and links.

On a uniform network, and if all ranks arrive at the same time and are equally fast, the first host stands for all if
the schedules are alike on all hosts (`ALIKE` of their algorithm): turning the hosts turns schedules and network into
themselves, and what is decided by nothing but these is then the same on all hosts. This is exact.

Simulates a collective on a network, event by event, with the schedules and the order of steps of the executor.

`crossing.py` says which links a message crosses, `scene.py` lays out what the core simulates (native/simulate), with
equal ranks as one where that is exact, and `calls.py` is the interface. May use: the rest of `schedule`, and the core.
Start reading at `calls.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.comm.schedule.cost_model import PIPE_NBYTES
from paceline.comm.schedule.network import Network, NetworkLink, most_with_loss
from paceline.comm.schedule.registry import ALIKE, build, wire_of
from paceline.comm.schedule.steps import ROOTED, Operation, Schedule, StepKind, flatten


@dataclass(frozen=True)
class LinkDirection:
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
class MessagePath:
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
    ways: tuple[tuple[LinkDirection, float], ...]


def find_path(network: Network, source: int, target: int) -> MessagePath:
    """Returns what a message from the rank `source` to the rank `target` meets."""
    here, there = network.host_of[source], network.host_of[target]
    if here == there:
        link = network.within_host
        ways = (
            (LinkDirection("rank", source, "out"), link.bytes_per_s),
            (LinkDirection("rank", target, "in"), link.bytes_per_s),
        )
        return _crossing([link], link.latency_s, ways)
    ends = network.node_of(here), network.node_of(there)
    between = [
        (LinkDirection("host", here, "up"), ends[0].bytes_per_s),
        (LinkDirection("host", there, "down"), ends[1].bytes_per_s),
    ]
    uplinks: list[NetworkLink] = []
    groups = network.group_of.get(here), network.group_of.get(there)
    for group, direction in zip(groups, ("up", "down"), strict=True):
        if group is not None and groups[0] != groups[1]:
            uplinks.append(network.groups[group].uplink)
            between.append((LinkDirection("group", group, direction), uplinks[-1].bytes_per_s))
    latency_s = max(link.latency_s for link in ends) + max((link.latency_s for link in uplinks), default=0.0)
    own = network.pairs.get((here, there))
    if own is not None:
        between.append((LinkDirection("hosts", here, "", there), own.bytes_per_s))
        return _crossing([*ends, *uplinks, own], own.latency_s, tuple(between))
    return _crossing([*ends, *uplinks], latency_s, tuple(between))


def _crossing(links: list[NetworkLink], latency_s: float, ways: tuple[tuple[LinkDirection, float], ...]) -> MessagePath:
    arrives = 1.0
    for link in links:
        arrives *= 1 - link.loss
    overhead_s = max(link.overhead_s for link in links)
    return MessagePath(latency_s, overhead_s, most_with_loss(latency_s, 1 - arrives), 1 / arrives, ways)


@dataclass
class SimulationInput:
    """What the core simulates. A program is for the rank of the same number, and for those that it stands for.

    `routes` are in the form of `_core.simulate`; `pairs` are the ranks of each, `ways` the links by their numbers.
    """

    network: Network
    standing: Callable[[int], int]  # the rank whose program stands for a rank
    turned: Callable[[int, int], int]  # (rank, by): what `rank` is if the rank `by` is turned to the one for it
    blocks: int = 0
    schedules: list[_core.Schedule] = field(default_factory=list)
    speeds: Sequence[float] = ()
    routes: array[float] = field(default_factory=lambda: array("d"))
    pairs: list[tuple[int, int]] = field(default_factory=list)
    ways: dict[LinkDirection, int] = field(default_factory=dict)
    capacities: array[float] = field(default_factory=lambda: array("d"))

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Adds the programs in the order of their ranks."""
        for schedule in schedules:
            self.blocks = schedule.blocks
            self.schedules.append(_to_core(schedule))
            for peer in dict.fromkeys(step.peer for step in schedule.steps if step.kind is StepKind.SEND):
                self._add_route(schedule.rank, peer)

    def _add_route(self, source: int, target: int) -> None:
        crossing = find_path(self.network, source, target)
        self.pairs.append((source, target))
        numbers = (source, target, self.standing(target), self.turned(source, target))
        self.routes.extend((*numbers, crossing.latency_s, crossing.overhead_s, crossing.most, len(crossing.ways)))
        for way, bytes_per_s in crossing.ways:
            self.routes.extend((self._number_of(way, bytes_per_s), crossing.weight))

    def _number_of(self, way: LinkDirection, bytes_per_s: float) -> int:
        way = self.stands_for(way)
        if way not in self.ways:
            self.ways[way] = len(self.ways)
            speed = self.speeds[way.number] if way.kind == "rank" and self.speeds else 1.0
            self.capacities.append(bytes_per_s * speed)
        return self.ways[way]

    def stands_for(self, way: LinkDirection) -> LinkDirection:
        """Returns the way that is simulated for a way."""
        if way.kind == "rank":
            return LinkDirection("rank", self.standing(way.number), way.direction)
        if way.kind == "host":
            host = self.network.host_of[self.standing(self.network.hosts[way.number][0])]
            return LinkDirection("host", host, way.direction)
        return way


def full_simulation(network: Network, speeds: Sequence[float]) -> SimulationInput:
    """Returns a scene in which every rank stands for itself."""
    return SimulationInput(network, lambda rank: rank, lambda rank, _: rank, speeds=speeds)


def folded_simulation(network: Network) -> SimulationInput:
    """Returns a scene in which the ranks of the first host stand for those in the same place on others."""
    per_host, world_size = len(network.hosts[0]), network.world_size

    def turned(rank: int, by: int) -> int:
        return (rank - (by - by % per_host)) % world_size

    return SimulationInput(network, lambda rank: rank % per_host, turned)


def _to_core(schedule: Schedule) -> _core.Schedule:
    at = schedule.blocks, schedule.rank, schedule.world_size
    return _core.Schedule.make(0, *at, flatten(schedule), wire_of(schedule.algorithm))


MOST_STEPS = 30_000_000
"""How many steps of all ranks together are simulated at most; more would not fit into a machine's memory."""


@dataclass(frozen=True)
class SimulatedMessage:
    """A message, from the departure of its first byte to the arrival of its last, in seconds after time 0.

    `step` is the place of its SEND in the sender's schedule.
    """

    source: int
    target: int
    step: int
    nbytes: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class CallTiming:
    """How a call went.

    Attributes:
        seconds: from the last rank's arrival to the last one's end.
        ends: when each rank ends, in seconds after time 0.
        bytes_per_link: what each link that is used carries, one entry for each direction.
        transfers: all messages in the order in which they arrive, if they were asked for.
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
    """Simulates a call on all ranks of a network.

    Args:
        algorithm: its name, or what is on the wire if the schedule quantises.
        operation: which collective.
        nbytes: the longest buffer of a rank, as for `cost.predict`.
        network: the ranks and the links between them.
        arrivals: when each rank makes the call, in seconds; all at 0 if left out.
        speeds: how fast each rank copies and reduces, compared with others; all 1 if left out.
        record: whether the timing has the transfers.
        root: the root, of operations that have one.
        fold: whether one host stands for all where that is exact.

    Raises:
        ValueError: the algorithm does not have the operation, there are not as many arrivals or speeds as ranks, or the
            schedules have too many steps.
    """
    n = network.world_size

    def schedule(rank: int) -> Schedule:
        return build(algorithm, operation, rank, n, root if operation in ROOTED else -1, network.hosts)

    alike = operation in ALIKE.get(algorithm, ()) and network.is_uniform and not record
    if fold and alike and len(set(arrivals or [0])) == len(set(speeds or [1])) == 1:
        schedules = map(schedule, network.hosts[0])
        scene = folded_simulation(network)
        return _simulate(
            scene, schedules, nbytes, _one_per_rank(arrivals, 0.0, n), _one_per_rank(speeds, 1.0, n), record
        )
    steps = len(schedule(n - 1).steps) * n
    if steps > MOST_STEPS:
        raise ValueError(
            f"{algorithm} {operation} of {n:,} ranks has some {steps:,} steps, too many to simulate: choose "
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
    """Simulates a call of these schedules, one for each rank in their order; see `simulate_call`."""
    n = network.world_size
    scene = full_simulation(network, speeds or ())
    return _simulate(scene, schedules, nbytes, _one_per_rank(arrivals, 0.0, n), _one_per_rank(speeds, 1.0, n), record)


def _one_per_rank(values: Sequence[float] | None, default: float, n: int) -> Sequence[float]:
    if values is not None and len(values) != n:
        raise ValueError(f"{len(values)} arrivals or speeds were given for {n} ranks: give one for each rank")
    return values if values is not None else [default] * n


def _simulate(
    scene: SimulationInput,
    schedules: Iterable[Schedule],
    nbytes: int,
    arrivals: Sequence[float],
    speeds: Sequence[float],
    record: bool,
) -> CallTiming:
    network = scene.network
    scene.add(schedules)
    simulated = len(scene.schedules)
    # A block has a byte at least, which stands for the headers of its messages.
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
    """Returns the bytes of each link that carries any, also of those for which another was simulated."""
    network = scene.network
    ways = dict.fromkeys(scene.ways)
    if len(scene.schedules) < network.world_size:
        for rank in range(network.world_size):
            ways.update(dict.fromkeys((LinkDirection("rank", rank, "out"), LinkDirection("rank", rank, "in"))))
        for host in range(len(network.hosts)):
            ways.update(dict.fromkeys((LinkDirection("host", host, "up"), LinkDirection("host", host, "down"))))
    found = {way.name(network): scene.ways.get(scene.stands_for(way)) for way in ways}
    return {name: carried[number] for name, number in found.items() if number is not None}
