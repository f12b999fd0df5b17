"""Synthesis of all-reduce schedules for networks with unequal links, their proof, and selection by simulation.

`tree_packing.py` packs trees into the network; the parts of a tensor are summed and distributed along these trees. This
module converts the transfers along the trees to steps for each rank. If all hosts have the same number of ranks, the
l-th ranks of all hosts run the trees on the l-th slice of the tensor; rings within the hosts reduce the slices
beforehand and distribute them afterward, as in `hierarchical.py`. If the numbers of ranks differ, the leaders run the
trees on the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.comm.schedule import ring, tree
from paceline.comm.schedule.cost import AlgorithmChoice, AlgorithmPrediction, PreferredAlgorithm, forced_or_best
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.registry import SYNTHESISED, algorithms_offering, build
from paceline.comm.schedule.simulation import CallTiming, simulate_schedules
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
from paceline.comm.schedule.tree_packing import DETOURS, MOST_HOSTS, TreeTransfer, by_begin, by_level, pack
from paceline.comm.schedule.verify import verify

MOST_RANKS = 64
"""The largest number of ranks for which the proof of the schedules takes less than a second."""

_LONG_NBYTES = 16 << 20
_NEARLY = 1.25  # an algorithm with a much lighter load is preferred up to this multiple of the least duration
_COMPETING = 1.05  # factor on the simulated duration if several connections may share an uplink
_LIGHTER = 0.75  # a load counts as "much lighter" up to this fraction of the fastest algorithm's load
_AS_FAST = 1.02  # an algorithm with fewer messages is preferred up to this multiple of the least duration


def synthesised_all_reduce(topology: RankTopology, transfers: Sequence[TreeTransfer]) -> Schedule:
    """Returns the schedule that performs the transfers between the hosts of `topology`, for the topology's rank."""
    _, host, local, me = home = find_host_position(topology)
    n_local, n_parts = len(local), 1 + max(each.part for each in transfers)
    if home.is_even:
        slices = [[BufferSlice(Buffer.OUTPUT, owner * n_parts, n_parts)] for owner in range(n_local)]
        steps = ring.reduce_phase(local, me, slices, slices, final=False)
        steps += _transfer_steps(transfers, home.rail, host, me * n_parts)
        steps += ring.gather_phase(local, me, slices)
        return Schedule(
            Operation.ALL_REDUCE, SYNTHESISED, topology.rank, topology.world_size, -1, n_local * n_parts, tuple(steps)
        )
    tensor = BufferSlice(Buffer.OUTPUT, 0, n_parts)
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += _transfer_steps(transfers, home.rail, host, 0)
    steps += tree.broadcast_phase(local, me, tensor)
    return Schedule(Operation.ALL_REDUCE, SYNTHESISED, topology.rank, topology.world_size, -1, n_parts, tuple(steps))


def _transfer_steps(transfers: Sequence[TreeTransfer], members: Sequence[int], host: int, first: int) -> list[Step]:
    """Returns the steps of members[host]. All members use the same order of transfers, so there are no deadlocks."""
    steps: list[Step] = []
    for each in transfers:
        block = BufferSlice(Buffer.OUTPUT, first + each.part)
        if each.source == host:
            steps.append(send(members[each.target], block))
        elif each.target == host and each.is_sum:
            steps.append(receive(members[each.source], block))
        elif each.target == host:
            steps.append(combine(members[each.source], block, block, each.is_last))
    return steps


def can_synthesise(network: Network) -> bool:
    """Returns True if some links differ and there are few enough hosts and ranks for synthesis."""
    uneven = bool(network.groups or network.pairs or network.nodes)
    return uneven and 1 < len(network.hosts) <= MOST_HOSTS and network.world_size <= MOST_RANKS


def synthesise(network: Network) -> list[Schedule]:
    """Returns verified all-reduce schedules for all ranks of a network.

    They use the packing and the order of transfers that are the fastest in a simulation with a long tensor; packings
    through gateways are preferred if they are only slightly slower. For the same network, the schedules are the same on
    every machine.

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
                    synthesised_all_reduce(RankTopology(rank, n, -1, network.hosts), transfers) for rank in range(n)
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
    worlds = {SYNTHESISED: schedules}
    for name in algorithms_offering(Operation.ALL_REDUCE):
        worlds[name] = [build(name, Operation.ALL_REDUCE, rank, n, -1, network.hosts) for rank in range(n)]
    timings = {name: simulate_schedules(world, network, nbytes) for name, world in worlds.items()}
    times = (AlgorithmPrediction(name, timing.seconds) for name, timing in timings.items())
    candidates = tuple(sorted(times, key=lambda each: each.seconds))
    most = {name: _most_nbytes(timing) for name, timing in timings.items()}
    messages = {name: max(len(each.steps) for each in world) for name, world in worlds.items()}
    hosts = len(network.hosts)
    preferred = _preferred(candidates, most, messages)
    return forced_or_best(Operation.ALL_REDUCE, nbytes, n, hosts, candidates, forced, preferred)


def _preferred(
    candidates: Sequence[AlgorithmPrediction], most: Mapping[str, float], messages: Mapping[str, int]
) -> PreferredAlgorithm | None:
    """Returns an algorithm that is nearly as fast as the first candidate and better in other respects, or None.

    Args:
        candidates: the algorithms from the fastest to the slowest.
        most: the number of bytes on the busiest link, for each algorithm.
        messages: the largest number of steps on any rank, for each algorithm.
    """
    seconds, nbytes = candidates[0].seconds, most[candidates[0].algorithm]
    for each in candidates:
        if each.seconds <= _NEARLY * seconds and most[each.algorithm] <= _LIGHTER * nbytes:
            return PreferredAlgorithm(each, "sends less over its busiest link")
    alike = [
        each
        for each in candidates
        if each.seconds <= _AS_FAST * seconds and most[each.algorithm] <= nbytes * (1 + 1e-9)
    ]
    fewest = min(alike, key=lambda each: messages[each.algorithm])
    return PreferredAlgorithm(fewest, "has fewer messages") if fewest != candidates[0] else None


def _most_nbytes(timing: CallTiming) -> float:
    """Returns the number of bytes on the busiest host link."""
    return max((nbytes for name, nbytes in timing.bytes_per_link.items() if name.startswith("host ")), default=0.0)
