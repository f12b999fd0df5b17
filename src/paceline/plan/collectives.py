"""How long a job's collectives take on a network: simulated, or read off what was measured on one host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.plan.calibration import HostCall
from paceline.plan.strategy import WIRES
from paceline.schedule.cost import choose, predict
from paceline.schedule.network import Link, Network
from paceline.schedule.registry import ALIKE
from paceline.schedule.steps import Operation

EXACT_RANKS = 256
"""Up to so many ranks every size is simulated; beyond, sizes between powers of four are interpolated."""

SIMULATED_RANKS = 2048
"""Of more ranks, calls are simulated only where one host stands for all; for the others there are the closed forms."""

_ON_ONE_HOST = "shared memory"


class Timing(Protocol):
    """What a simulation says of a call."""

    @property
    def seconds(self) -> float:
        """From the last arrival to the last end."""
        ...


Simulate = Callable[[str, Operation, int, Network], Timing]


@dataclass(frozen=True)
class TimedCall:
    """A call: the algorithm that the engine would choose, and the seconds that it takes."""

    algorithm: str
    seconds: float


class CallTimes:
    """The times of collectives on one network; each different call is simulated once.

    Args:
        network: the hosts and their links.
        host_calls: all-reduces that were measured on one host.
        simulate: `simulate_call` of `schedule/timing/calls.py`.
    """

    def __init__(self, network: Network, host_calls: Sequence[HostCall], simulate: Simulate) -> None:
        self.network = network
        self._host_calls = tuple(host_calls)
        self._simulate = simulate
        self._hosts = [list(ranks) for ranks in network.hosts]
        self.ranks = sum(map(len, self._hosts))
        self._known: dict[tuple[str, Operation, int, str | None], float] = {}

    def call(
        self, operation: Operation, nbytes: int, *, algorithm: str | None = None, wire: str | None = None
    ) -> TimedCall:
        """Returns the call's time.

        Args:
            operation: which collective.
            nbytes: the longest buffer of a rank, as for `schedule.cost.predict`.
            algorithm: the one that is used where it has the operation; None for the one that the engine chooses.
            wire: what is sent between hosts; None for the data as it is.
        """
        if self.ranks == 1 or nbytes == 0:
            return TimedCall("none", 0.0)
        if len(self._hosts) == 1 and algorithm is None and self._host_calls:
            return TimedCall(_ON_ONE_HOST, self._on_one_host(operation, nbytes))
        if wire is not None and len(self._hosts) > 1:
            return TimedCall(wire, self._packed(wire, operation, nbytes))
        name = self._chosen(operation, nbytes, algorithm)
        return TimedCall(name, self._simulated(name, operation, nbytes, None))

    def _chosen(self, operation: Operation, nbytes: int, algorithm: str | None) -> str:
        """Returns `algorithm` where it has the operation, and otherwise the one that the engine would choose."""
        choice = choose(self.network.cost_model(), operation, nbytes, self.ranks, self._hosts)
        offered = [candidate.algorithm for candidate in choice.candidates]
        if algorithm in offered:
            return str(algorithm)
        return offered[0]

    def _packed(self, wire: str, operation: Operation, nbytes: int) -> float:
        """Returns the time of a call that packs: its own schedule's, or in a large world about that of a ring's.

        The schedule is an exchange between all pairs of hosts, which is too much to simulate in a large world.
        """
        if self.ranks <= EXACT_RANKS:
            return self._at(wire, operation, nbytes, None)
        return self._simulated("hierarchical", operation, nbytes, wire)

    def _simulated(self, algorithm: str, operation: Operation, nbytes: int, wire: str | None) -> float:
        if self.ranks <= EXACT_RANKS:
            return self._at(algorithm, operation, nbytes, wire)
        below = 1 << ((nbytes.bit_length() - 1) & ~1)
        if below == nbytes:
            return self._at(algorithm, operation, nbytes, wire)
        first, last = self._at(algorithm, operation, below, wire), self._at(algorithm, operation, 4 * below, wire)
        return first + (last - first) * (nbytes - below) / (3 * below)

    def _at(self, algorithm: str, operation: Operation, nbytes: int, wire: str | None) -> float:
        key = (algorithm, operation, nbytes, wire)
        if key not in self._known:
            network = self.network if wire is None else carrying_more(self.network, 1 / WIRES[wire])
            is_one_for_all = network.is_uniform and operation in ALIKE.get(algorithm, ())
            if self.ranks <= SIMULATED_RANKS or is_one_for_all:
                self._known[key] = self._simulate(algorithm, operation, nbytes, network).seconds
            else:
                self._known[key] = predict(network.cost_model(), algorithm, operation, nbytes, self.ranks, self._hosts)
        return self._known[key]

    def _on_one_host(self, operation: Operation, nbytes: int) -> float:
        """Returns the time by the measured all-reduces, of which a reduce-scatter or a gather is about one half."""
        seconds = interpolated(self._host_calls, self.ranks, nbytes)
        return seconds if operation is Operation.ALL_REDUCE else seconds / 2


def carrying_more(network: Network, times: float) -> Network:
    """Returns the network as data that is packed finds it: links between hosts carry so many times as many bytes."""

    def more(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * times)

    return replace(
        network,
        node=more(network.node),
        groups=tuple(replace(group, uplink=more(group.uplink)) for group in network.groups),
        pairs={pair: more(link) for pair, link in network.pairs.items()},
        nodes={host: more(link) for host, link in network.nodes.items()},
    )


def interpolated(calls: Sequence[HostCall], ranks: int, nbytes: int) -> float:
    """Returns the seconds of an all-reduce on one host between the sizes that were measured.

    Below the least size the time is that of the least; beyond the largest it grows with the size. Where other numbers
    of ranks were measured, the nearest one counts, and the time grows with the number, as ranks share the memory.
    """
    nearest = min({call.ranks for call in calls}, key=lambda measured: (abs(measured - ranks), measured))
    points = sorted((call.nbytes, call.seconds) for call in calls if call.ranks == nearest)
    more = ranks / nearest
    sizes = [size for size, _ in points]
    at = bisect_left(sizes, nbytes)
    if at == 0:
        return points[0][1] * more
    if at == len(points):
        return points[-1][1] * nbytes / sizes[-1] * more
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return (low_s + (high_s - low_s) * (nbytes - low) / (high - low)) * more
