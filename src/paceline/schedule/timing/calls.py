"""The interface of the simulation: how long a call takes, and who sends what to whom meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline import _core
from paceline.schedule.cost_model import PIPE_NBYTES
from paceline.schedule.network import Network
from paceline.schedule.registry import ALIKE, build
from paceline.schedule.steps import ROOTED, Operation, Schedule
from paceline.schedule.timing.crossing import Way
from paceline.schedule.timing.scene import Scene, folded_scene, whole_scene

MOST_STEPS = 30_000_000
"""How many steps of all ranks together are simulated at most; more would not fit into a machine's memory."""


@dataclass(frozen=True)
class Transfer:
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
    transfers: tuple[Transfer, ...] = ()


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
        scene = folded_scene(network)
        return _simulate(scene, schedules, nbytes, _each(arrivals, 0.0, n), _each(speeds, 1.0, n), record)
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
    scene = whole_scene(network, speeds or ())
    return _simulate(scene, schedules, nbytes, _each(arrivals, 0.0, n), _each(speeds, 1.0, n), record)


def _each(values: Sequence[float] | None, default: float, n: int) -> Sequence[float]:
    if values is not None and len(values) != n:
        raise ValueError(f"{len(values)} arrivals or speeds were given for {n} ranks: give one for each rank")
    return values if values is not None else [default] * n


def _simulate(
    scene: Scene,
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
            Transfer(*scene.pairs[route], step, moved, begin_s, end_s)
            for route, step, moved, begin_s, end_s in transfers
        ),
    )


def _by_name(scene: Scene, carried: Sequence[float]) -> dict[str, float]:
    """Returns the bytes of each link that carries any, also of those for which another was simulated."""
    network = scene.network
    ways = dict.fromkeys(scene.ways)
    if len(scene.schedules) < network.world_size:
        for rank in range(network.world_size):
            ways.update(dict.fromkeys((Way("rank", rank, "out"), Way("rank", rank, "in"))))
        for host in range(len(network.hosts)):
            ways.update(dict.fromkeys((Way("host", host, "up"), Way("host", host, "down"))))
    found = {way.name(network): scene.ways.get(scene.stands_for(way)) for way in ways}
    return {name: carried[number] for name, number in found.items() if number is not None}
