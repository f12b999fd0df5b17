"""JobPrediction: the predicted step time, rate, bottleneck, memory and cost of a job.

A step takes as long as its slowest rank. Each rank's time is drawn from the measured times, and the largest of n draws
is below the q^(1/n) quantile of the measured times with probability q. The interval from `low_s` to `high_s` combines
this variation with two other uncertainties: a later run on the same machine differs from the measured run, and a call
differs from its simulation. The step is predicted with one input changed at a time, and the deviations are added in
quadrature (JCGM 100:2008, 5.1). If the combined deviation exceeds the duration of the step, `low_s` is the duration
with all inputs changed at once, which is positive.

`advise` predicts changes to a job, each separately, and ranks them by their gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.comm.schedule.network import Network, NetworkLink
from paceline.operate.plan.calibration import Calibration, Origin, relative_spread
from paceline.operate.plan.step_time import WIRES, CallTimes, Simulate, StepTime, Strategy, map_links, step_of

PER_SAMPLES = 1_000_000
"""The number of samples that node-hours refer to. If samples are unknown, node-hours refer to 1,000 steps."""

LEAST_NOISE = 0.05
"""The minimum noise of a machine, as a fraction of a step, even if the measured steps vary less.

A later run on the same machine differs by more than a measurement over a few seconds can show.
"""

CALL_ERRORS = (0.1, 0.2)
"""The assumed 5th and 95th percentiles of the relative error of a simulated call: the call may be this fraction shorter
or longer.

The values are rounded from the first table of docs/plan.md, which was measured on an idle machine.
"""

_DEVIATIONS = 1.645  # standard deviations from the median to the 95th percentile of a normal distribution
_TO_DEVIATION = 1.4826  # standard deviations in a median absolute deviation (Rousseeuw and Croux 1993)
_MOST_NOISE = 0.5

_WORTH_NAMING = 0.2  # communication or the slowest rank is a bottleneck if it takes at least this fraction of a step
_FAST = 1e15  # bytes per second; stands for an unlimited rate

Networks = Callable[[int, int], Network]
"""A function that returns the network for a given number of hosts and of ranks per host."""


@dataclass(frozen=True)
class RankMemory:
    """Memory use of a rank by purpose, in bytes."""

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    other_nbytes: int

    @property
    def nbytes(self) -> int:
        """The total memory."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes + self.other_nbytes


@dataclass(frozen=True)
class StepInterval:
    """The uncertainty of the predicted step time due to one cause, as fractions of that time.

    Attributes:
        less: the distance from the predicted time down to the 5th percentile.
        more: the distance from the predicted time up to the 95th percentile.
    """

    less: float
    more: float


@dataclass(frozen=True)
class JobPrediction:
    """The prediction for a job on `nodes` hosts with `per_node` ranks each.

    Attributes:
        nodes: the number of hosts.
        per_node: the number of ranks on each host.
        strategy: the strategy of the job.
        step: the parts of the median step.
        low_s: the 5th percentile of a step's duration.
        high_s: the 95th percentile of a step's duration.
        variation: the part of the interval from `low_s` to `high_s` due to the measured variation between steps.
        machine: the part of the interval due to the machine's run-to-run noise.
        network: the part of the interval due to calls that differ from their simulation.
        alone_s: the duration of a step on a rank that runs alone.
        samples_per_s: the total number of samples per second; None if the number of samples per step is unknown.
        node_hours: the cost of training on `PER_SAMPLES` samples.
        memory: the memory use of a rank.
        traffic_nbytes: the number of bytes that a host sends to other hosts per step.
        bottleneck: the component that limits the rate; "" if it was not computed.
    """

    nodes: int
    per_node: int
    strategy: Strategy
    step: StepTime
    low_s: float
    high_s: float
    variation: StepInterval
    machine: StepInterval
    network: StepInterval
    alone_s: float
    samples_per_s: float | None
    node_hours: float
    memory: RankMemory
    traffic_nbytes: float
    bottleneck: str

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def efficiency(self) -> float:
        """The rate, relative to the rate of the same number of ranks that never wait."""
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
    """Predicts a job on a network.

    Args:
        calibration: the measurements taken on one rank.
        network: the hosts and their links; all hosts have the same number of ranks.
        strategy: the strategy of the job.
        simulate: `simulate_call` from `comm/schedule/simulation.py`.
        times: a cache with the durations of calls on `network`, or None.
        explains: whether to compute the bottleneck, which requires simulations of other networks.
    """
    times = times or CallTimes(network, calibration.links.host_calls, simulate)
    nodes, ranks = len(network.hosts), times.ranks
    spread = relative_spread(calibration.step_s, max(1, strategy.period))
    usual = slowest_of(spread, ranks, 0.5)
    step = step_of(calibration, strategy, times, usual)

    def deviation(less: StepTime, more: StepTime) -> StepInterval:
        return StepInterval(max(0.0, 1 - less.seconds / step.seconds), max(0.0, more.seconds / step.seconds - 1))

    variation = deviation(*(step_of(calibration, strategy, times, slowest_of(spread, ranks, q)) for q in (0.05, 0.95)))
    noise = machine_noise(calibration.step_s, calibration.origin.contention)
    machine = deviation(*(step_of(calibration, strategy, times, usual * by) for by in (1 - noise, 1 + noise)))
    factors = call_factors(calibration.origin)
    network_part = deviation(*(step_of(calibration, strategy, times.scaled(by), usual) for by in factors))
    parts = (variation, machine, network_part)
    less = [part.less for part in parts]
    alone_s = _alone(calibration, strategy)
    samples = None if calibration.samples is None else calibration.samples * strategy.forwards / calibration.forwards
    rate = None if samples is None else ranks * samples / step.seconds
    seconds = PER_SAMPLES / rate if rate else 1000 * step.seconds
    return JobPrediction(
        nodes=nodes,
        per_node=ranks // nodes,
        strategy=strategy,
        step=step,
        low_s=step.seconds * max(1 - math.hypot(*less), math.prod(1 - fraction for fraction in less)),
        high_s=step.seconds * (1 + math.hypot(*(part.more for part in parts))),
        variation=variation,
        machine=machine,
        network=network_part,
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


def machine_noise(step_s: Sequence[float], contention: float = 0.0) -> float:
    """Returns the fraction by which a later run may differ from the measured run.

    The fraction is unknown, because measuring it takes several runs. It is assumed to be the variation between steps or
    the share of the cores that other processes took from the ranks, whichever is larger, but at least `LEAST_NOISE`. In
    a later run, the other processes may be absent, or there may be twice as many.

    Args:
        step_s: the duration of each measured step, in seconds.
        contention: the fraction of the cores' time that other processes took (`Origin.contention`).
    """
    middle = median(step_s)
    deviation = (
        _TO_DEVIATION * median(abs(duration_s - middle) for duration_s in step_s) / middle if middle > 0 else 0.0
    )
    return min(_MOST_NOISE, max(LEAST_NOISE, _DEVIATIONS * deviation, contention))


def call_factors(origin: Origin) -> tuple[float, float]:
    """Returns the 5th and 95th percentile of a call's duration as multiples of the simulated duration.

    If the measured machine has no idle cores, a call also waits for ranks that are computing, and this wait is not
    modeled. The upper error grows with the square root of the number of threads per core.
    """
    busy = max(1.0, origin.together * origin.threads / max(1, origin.cores))
    return 1 - CALL_ERRORS[0], 1 + CALL_ERRORS[1] * math.sqrt(busy)


def slowest_of(spread: Sequence[float], ranks: int, share: float) -> float:
    """Returns the `share` quantile of the largest of `ranks` draws from `spread`, which is sorted.

    Quantiles are interpolated and never exceed the largest value in `spread`.
    """
    position: float = share ** (1 / ranks) * (len(spread) - 1)
    below = min(int(position), len(spread) - 1)
    above = min(below + 1, len(spread) - 1)
    return spread[below] + (spread[above] - spread[below]) * (position - below)


def memory_of(calibration: Calibration, strategy: Strategy, ranks: int) -> RankMemory:
    """Returns the memory use of a rank; each stage of ZeRO shards more of this memory."""
    memory = calibration.memory
    parts = [1 if strategy.zero < stage else ranks for stage in (1, 2, 3)]
    # DiLoCo also stores the outer parameters, their momentum and the tensors that it exchanges.
    extra = 3 * memory.parameter_nbytes if strategy.period else 0
    return RankMemory(
        -(-memory.parameter_nbytes // parts[2]),
        -(-memory.gradient_nbytes // parts[1]),
        -(-memory.optimizer_nbytes // parts[0]) + extra,
        memory.other_nbytes,
    )


def traffic_of(calibration: Calibration, strategy: Strategy, nodes: int) -> float:
    """Returns the bytes that a host sends to other hosts per step, assuming bandwidth-optimal algorithms."""
    if nodes == 1:
        return 0.0
    once = (nodes - 1) / nodes
    packed = WIRES[strategy.wire] if strategy.wire else 1.0
    parameters = calibration.memory.parameter_nbytes
    if strategy.period:
        return 2 * once * parameters * packed / strategy.period
    halves = 1 if strategy.zero >= 2 else 2
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * strategy.forwards}[strategy.zero]
    return once * (halves * calibration.gradient_nbytes * packed + gathers * parameters + calibration.buffer_nbytes)


def bottleneck_of(
    calibration: Calibration, network: Network, strategy: Strategy, simulate: Simulate, step: StepTime
) -> str:
    """Returns the bottleneck: computing, data, stragglers, or the link property that delays the step most."""
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
    """Returns copies of the network, each with one property idealized, keyed by the name of this property."""
    if len(network.hosts) == 1:
        return {}

    def unlimited(link: NetworkLink) -> NetworkLink:
        return replace(link, bytes_per_s=_FAST, loss=0.0)

    def instant(link: NetworkLink) -> NetworkLink:
        return replace(link, latency_s=0.0)

    changed = {
        "latency": replace(map_links(network, instant), within_host=instant(network.within_host)),
        "links within hosts": replace(network, within_host=unlimited(network.within_host)),
        "links of hosts": replace(map_links(network, unlimited), groups=network.groups),
    }
    if network.groups:
        changed["uplinks of regions"] = replace(network, groups=map_links(network, unlimited).groups)
    return changed


_MIB = 1 << 20
_BUCKETS_MIB = (1, 5, 25, 100)
_PERIOD = 16
_WORTH_SAYING = 0.01  # minimum gain to report, as a fraction of the job's samples per second
_MEMORY_WORTH_SAYING = 0.05


@dataclass(frozen=True)
class Change:
    """A change to a job.

    Attributes:
        what: the change, written as the user would write it in a script or a command.
        but: a disadvantage of the change, or an effect that the prediction ignores; "" if there is neither.
        strategy: the strategy after the change.
        per_node: the number of ranks per host after the change.
    """

    what: str
    but: str
    strategy: Strategy
    per_node: int


@dataclass(frozen=True)
class Advice:
    """A change with its prediction and its gain.

    Attributes:
        change: the suggested change.
        prediction: the prediction for the changed job.
        gain: the relative increase in samples per second.
        saved_nbytes: the memory that the change saves on each rank, in bytes.
    """

    change: Change
    prediction: JobPrediction
    gain: float
    saved_nbytes: int


def advise(calibration: Calibration, now: JobPrediction, networks: Networks, simulate: Simulate) -> list[Advice]:
    """Returns the changes that raise the rate by at least 1% or save memory, largest gain first.

    Args:
        calibration: the measurements taken on one rank.
        now: the prediction for the unchanged job.
        networks: a function that returns the network for a given number of hosts and of ranks per host.
        simulate: `simulate_call` from `comm/schedule/simulation.py`.
    """
    times: dict[int, CallTimes] = {}
    found = []
    for change in changes(now, calibration):
        network = networks(now.nodes, change.per_node)
        known = times.setdefault(change.per_node, CallTimes(network, calibration.links.host_calls, simulate))
        then = predict(calibration, network, change.strategy, simulate, known, explains=False)
        gain = work_rate(then) / work_rate(now) - 1
        saved = now.memory.nbytes - then.memory.nbytes
        if gain >= _WORTH_SAYING or saved >= _MEMORY_WORTH_SAYING * now.memory.nbytes:
            found.append(Advice(change, then, gain, saved))
    return sorted(found, key=lambda advice: -advice.gain)


def work_rate(prediction: JobPrediction) -> float:
    """Returns the number of forward passes per second over all ranks. The samples per second are proportional to it."""
    return prediction.ranks * prediction.strategy.forwards / prediction.step.seconds


def changes(now: JobPrediction, calibration: Calibration) -> Iterator[Change]:
    """Yields every applicable change to a job. Each change affects one setting."""
    base, per_node = now.strategy, now.per_node
    if now.ranks == 1:
        return
    if not base.zero and not base.period:
        yield from _buckets(base, per_node, calibration.gradient_nbytes)
        if not base.overlaps:
            yield Change(
                "overlap=True", "each rank needs one core more than those that it computes on",
                replace(base, overlaps=True), per_node,
            )  # fmt: skip
        for times in (2, 4):
            yield Change(
                f"accumulate {times * base.forwards} backward passes per step (no_sync)",
                f"the batch of a step is {times} times as large",
                replace(base, forwards=times * base.forwards),
                per_node,
            )
        yield Change(
            f"DiLoCo(every={_PERIOD})", "the ranks' parameters differ between exchanges; compare the loss",
            replace(base, period=_PERIOD), per_node,
        )  # fmt: skip
        for stage in (1, 2, 3):
            yield Change(f"ZeroRedundancyOptimizer, stage {stage}", "", replace(base, zero=stage), per_node)
    if base.wire is None and now.nodes > 1 and base.zero == 0:
        for wire in WIRES:
            but = "gradients are rounded between hosts; the time for rounding is not included"
            yield Change(f'wire="{wire}"', but, replace(base, wire=wire), per_node)
    if now.nodes > 1 and now.step.algorithm in ("ring", "hierarchical") and per_node > 1:
        other = "hierarchical" if now.step.algorithm == "ring" else "ring"
        yield Change(f'algorithm="{other}"', "", replace(base, algorithm=other), per_node)
    if per_node > 1 and now.nodes > 1:
        but = "this assumes that a rank computes as fast as before"
        yield Change(f"{per_node // 2} ranks per node", but, base, per_node // 2)


def _buckets(base: Strategy, per_node: int, gradient_nbytes: int) -> Iterator[Change]:
    for size in _BUCKETS_MIB:
        caps = (min(_MIB, size * _MIB), size * _MIB)
        if size * _MIB < 4 * gradient_nbytes and caps != base.bucket_nbytes:
            yield Change(f"bucket_cap_mb={size}", "", replace(base, bucket_nbytes=caps), per_node)
