"""Makes schedules for an uneven network, proves them, and tells by simulation when they are the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.schedule.cost import Choice, Prediction, Preferred, forced_or_best
from paceline.schedule.network import Network
from paceline.schedule.registry import SYNTHESISED, build, offers
from paceline.schedule.steps import Operation, Place, Schedule
from paceline.schedule.synthesis.emitting import all_reduce
from paceline.schedule.synthesis.ordering import by_begin, by_level
from paceline.schedule.synthesis.trees import DETOURS, MOST_HOSTS, pack
from paceline.schedule.timing import CallTiming, simulate_schedules
from paceline.schedule.verify.symbolic import verify

MOST_RANKS = 64
"""The proof of so many ranks takes less than a second."""

_LONG_NBYTES = 16 << 20
_NEARLY = 1.25  # times as long as the fastest
_COMPETING = 1.05  # times as long as simulated, if several connections may share an uplink
_LIGHTER = 0.75  # of the bytes that the fastest sends over its busiest link
_AS_FAST = 1.02  # times as long as the fastest


def can_synthesise(network: Network) -> bool:
    """Returns whether a schedule is worth making: some links differ, and the hosts and the ranks are not too many."""
    uneven = bool(network.groups or network.pairs or network.nodes)
    return uneven and 1 < len(network.hosts) <= MOST_HOSTS and network.world_size <= MOST_RANKS


def synthesise(network: Network) -> list[Schedule]:
    """Returns an all-reduce's schedules for all ranks of a network, which are proved to be right.

    Of several packings and orders of their transfers, those are taken that are the fastest in a simulation of a long
    tensor, those through gateways also if they are a little slower. The same network gives the same schedules on every
    machine.

    Raises:
        ScheduleError: the schedules are wrong, which would be a fault of this package.
    """
    n = network.world_size
    found: list[tuple[float, list[Schedule]]] = []
    for through_gateways in (False, True) if network.groups else (False,):
        for detour in DETOURS:
            parts = pack(network, detour, through_gateways=through_gateways).parts
            for transfers in (by_level(parts), by_begin(network, parts)):
                world = [all_reduce(Place(rank, n, -1, network.hosts), transfers) for rank in range(n)]
                seconds = simulate_schedules(world, network, _LONG_NBYTES).seconds
                found.append((seconds if through_gateways else seconds * _COMPETING, world))
    _, fastest = min(found, key=lambda each: each[0])
    verify(fastest)
    return fastest


def choose_all_reduce(
    network: Network, schedules: Sequence[Schedule], nbytes: int, forced: str | None = None
) -> Choice:
    """Returns the best algorithm for an all-reduce of so many bytes by simulation, or `forced`.

    That is the fastest, unless another is nearly as fast and loads its busiest link much less, or is as fast with as
    little on that link and fewer messages: what a simulation leaves out, such as a core that serves many connections,
    or a queue that overflows, costs most where much is sent, and each message costs something.
    """
    n = network.world_size
    worlds = {SYNTHESISED: schedules}
    for name in offers(Operation.ALL_REDUCE):
        worlds[name] = [build(name, Operation.ALL_REDUCE, rank, n, -1, network.hosts) for rank in range(n)]
    timings = {name: simulate_schedules(world, network, nbytes) for name, world in worlds.items()}
    times = (Prediction(name, timing.seconds) for name, timing in timings.items())
    candidates = tuple(sorted(times, key=lambda each: each.seconds))
    most = {name: _most_nbytes(timing) for name, timing in timings.items()}
    messages = {name: max(len(each.steps) for each in world) for name, world in worlds.items()}
    hosts = len(network.hosts)
    preferred = _preferred(candidates, most, messages)
    return forced_or_best(Operation.ALL_REDUCE, nbytes, n, hosts, candidates, forced, preferred)


def _preferred(
    candidates: Sequence[Prediction], most: Mapping[str, float], messages: Mapping[str, int]
) -> Preferred | None:
    """Returns one that is about as fast as the first candidate, and better otherwise.

    Args:
        candidates: the algorithms from the fastest to the slowest.
        most: the bytes on the busiest link of each.
        messages: the steps of the rank that has most, for each.
    """
    seconds, nbytes = candidates[0].seconds, most[candidates[0].algorithm]
    for each in candidates:
        if each.seconds <= _NEARLY * seconds and most[each.algorithm] <= _LIGHTER * nbytes:
            return Preferred(each, "sends less over its busiest link")
    alike = [
        each
        for each in candidates
        if each.seconds <= _AS_FAST * seconds and most[each.algorithm] <= nbytes * (1 + 1e-9)
    ]
    fewest = min(alike, key=lambda each: messages[each.algorithm])
    return Preferred(fewest, "has fewer messages") if fewest != candidates[0] else None


def _most_nbytes(timing: CallTiming) -> float:
    """Returns the bytes on the link of a host that carries most."""
    return max((nbytes for name, nbytes in timing.bytes_per_link.items() if name.startswith("host ")), default=0.0)
