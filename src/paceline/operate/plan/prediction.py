"""Predicts a job of so many hosts: its step, its rate, what bounds it, its memory and its cost.

A step lasts as long as its slowest rank's. The band says how the time varies from step to step: each rank's own time is
drawn from the measured ones, and the largest of n draws lies below their q^(1/n) quantile with probability q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.comm.schedule.network import Network, NetworkLink
from paceline.operate.plan.calibration import Calibration, relative_spread
from paceline.operate.plan.step_time import WIRES, CallTimes, Simulate, StepTime, Strategy, step_of

PER_SAMPLES = 1_000_000
"""For so many samples, or for a thousand steps where samples are not known, node-hours are given."""

_WORTH_NAMING = 0.2  # of a step, which exposed communication or waiting for the slowest rank must take

_FAST = 1e15  # bytes a second of a link that takes no time

Networks = Callable[[int, int], Network]
"""Returns the network of so many hosts with so many ranks each."""


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank, by what they hold."""

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    other_nbytes: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes + self.other_nbytes


@dataclass(frozen=True)
class JobPrediction:
    """A job of `nodes` hosts with `per_node` ranks each.

    Attributes:
        step: the median step; `low_s` and `high_s` are the 5th and the 95th percentile.
        alone_s: the step of one rank that waits for nobody.
        samples_per_s: of all ranks; None if a rank's samples are not known.
        traffic_nbytes: what a host sends to others in a step.
        bottleneck: what bounds the rate; "" where it was not looked for.
    """

    nodes: int
    per_node: int
    strategy: Strategy
    step: StepTime
    low_s: float
    high_s: float
    alone_s: float
    samples_per_s: float | None
    node_hours: float
    memory: RankMemory
    traffic_nbytes: float
    bottleneck: str

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.nodes * self.per_node

    @property
    def efficiency(self) -> float:
        """The rate divided by that of as many ranks that wait for nobody."""
        return self.alone_s / self.step.seconds


def predict(
    calibration: Calibration,
    network: Network,
    strategy: Strategy,
    simulate: Simulate,
    times: CallTimes | None = None,
    *,
    explains: bool = True,
) -> JobPrediction:
    """Returns what a job on the network would do.

    Args:
        calibration: what was measured on one rank.
        network: the hosts, which have equally many ranks each, and their links.
        strategy: how the job trains.
        simulate: `simulate_call` of `comm/schedule/simulation.py`.
        times: the calls' times on that network, if some are known already.
        explains: whether the bottleneck is looked for, for which other networks are simulated.
    """
    times = times or CallTimes(network, calibration.links.host_calls, simulate)
    nodes, ranks = len(network.hosts), times.ranks
    spread = relative_spread(calibration.step_s, max(1, strategy.period))
    steps = [step_of(calibration, strategy, times, slowest_of(spread, ranks, share)) for share in (0.05, 0.5, 0.95)]
    step = steps[1]
    alone_s = _alone(calibration, strategy)
    samples = None if calibration.samples is None else calibration.samples * strategy.forwards / calibration.forwards
    rate = None if samples is None else ranks * samples / step.seconds
    seconds = PER_SAMPLES / rate if rate else 1000 * step.seconds
    return JobPrediction(
        nodes=nodes,
        per_node=ranks // nodes,
        strategy=strategy,
        step=step,
        low_s=steps[0].seconds,
        high_s=steps[2].seconds,
        alone_s=alone_s,
        samples_per_s=rate,
        node_hours=nodes * seconds / 3600,
        memory=memory_of(calibration, strategy, ranks),
        traffic_nbytes=traffic_of(calibration, strategy, nodes),
        bottleneck=bottleneck_of(calibration, network, strategy, simulate, step) if explains else "",
    )


def _alone(calibration: Calibration, strategy: Strategy) -> float:
    times = calibration.times
    return calibration.alone_s + (strategy.forwards - calibration.forwards) * (times.forward_s + times.backward_s)


def slowest_of(spread: Sequence[float], ranks: int, share: float) -> float:
    """Returns what the largest of `ranks` draws from `spread`, which is sorted, stays below with probability `share`.

    Between the values it interpolates; nothing is slower than the slowest that was measured.
    """
    place: float = share ** (1 / ranks) * (len(spread) - 1)
    at = min(int(place), len(spread) - 1)
    above = spread[min(at + 1, len(spread) - 1)]
    return spread[at] + (above - spread[at]) * (place - at)


def memory_of(calibration: Calibration, strategy: Strategy, ranks: int) -> RankMemory:
    """Returns the bytes of a rank; each stage of ZeRO divides more of them among the ranks."""
    memory = calibration.memory
    parts = [1 if strategy.zero < stage else ranks for stage in (1, 2, 3)]
    # DiLoCo keeps the outer parameters, their momentum and what is being averaged.
    extra = 3 * memory.parameter_nbytes if strategy.period else 0
    return RankMemory(
        -(-memory.parameter_nbytes // parts[2]),
        -(-memory.gradient_nbytes // parts[1]),
        -(-memory.optimizer_nbytes // parts[0]) + extra,
        memory.other_nbytes,
    )


def traffic_of(calibration: Calibration, strategy: Strategy, nodes: int) -> float:
    """Returns the bytes that a host sends to others in a step: what an algorithm that sends no byte twice needs."""
    if nodes == 1:
        return 0.0
    once = (nodes - 1) / nodes
    packed = WIRES[strategy.wire] if strategy.wire else 1.0
    parameters = calibration.memory.parameter_nbytes
    if strategy.period:
        return 2 * once * parameters * packed / strategy.period
    halves = 1 if strategy.zero >= 2 else 2
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * strategy.forwards}[strategy.zero]
    return once * (halves * calibration.gradient_nbytes * packed + gathers * parameters) + once * (
        0 if strategy.period else calibration.buffer_nbytes
    )


def bottleneck_of(
    calibration: Calibration, network: Network, strategy: Strategy, simulate: Simulate, step: StepTime
) -> str:
    """Returns what shortens the step most where it takes no time: the computing, or a property of the links."""
    alone_s = _alone(calibration, strategy)
    late_s = step.computing_s - alone_s
    if step.exposed_s > max(late_s, _WORTH_NAMING * step.seconds):
        faster = {name: changed for name, changed in _without(network).items() if changed != network}
        factor = step.computing_s / alone_s
        left = {
            name: step_of(
                calibration, strategy, CallTimes(changed, calibration.links.host_calls, simulate), factor
            ).seconds
            for name, changed in faster.items()
        }
        return min(left, key=lambda name: left[name]) if left else "shared memory"
    if late_s > _WORTH_NAMING * step.seconds:
        return "stragglers"
    return "data" if step.data_s > step.computing_s / 2 else "computing"


def _without(network: Network) -> dict[str, Network]:
    """Returns the network with one of its properties taking no time, by what it is called."""
    if len(network.hosts) == 1:
        return {}
    idle = {"latency": _instant(network)}
    idle["links within hosts"] = replace(network, within_host=_endless(network.within_host))
    idle["links of hosts"] = replace(
        network,
        node=_endless(network.node),
        nodes={host: _endless(link) for host, link in network.nodes.items()},
        pairs={pair: _endless(link) for pair, link in network.pairs.items()},
    )
    if network.groups:
        groups = tuple(replace(group, uplink=_endless(group.uplink)) for group in network.groups)
        idle["uplinks of regions"] = replace(network, groups=groups)
    return idle


def _endless(link: NetworkLink) -> NetworkLink:
    return replace(link, bytes_per_s=_FAST, loss=0.0)


def _instant(network: Network) -> Network:
    def instant(link: NetworkLink) -> NetworkLink:
        return replace(link, latency_s=0.0)

    return replace(
        network,
        within_host=instant(network.within_host),
        node=instant(network.node),
        groups=tuple(replace(group, uplink=instant(group.uplink)) for group in network.groups),
        pairs={pair: instant(link) for pair, link in network.pairs.items()},
        nodes={host: instant(link) for host, link in network.nodes.items()},
    )
