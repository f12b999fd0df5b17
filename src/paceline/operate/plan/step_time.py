"""StepTime: the duration of one step of data-parallel training, with its exposed communication time.

A step on a rank consists of data loading, forward and backward passes, the optimizer's step and other work, in
sequence. Buckets are averaged one at a time and strictly in order, as in `train/ddp/reducer.py`. Each bucket except the
last can be averaged during the backward pass, as soon as it is full. The last bucket is averaged after the backward
pass. `CallTimes` computes the durations of collectives by simulating a network or by interpolating between measurements
on one host.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.comm.schedule.algorithms import ALIKE, choose, predict
from paceline.comm.schedule.network import Network, NetworkLink
from paceline.comm.schedule.steps import Operation
from paceline.operate.plan.calibration import Calibration, HostCall, MeasuredGradient
from paceline.train.ddp.bucket_assignment import make_buckets

WIRES = {"bf16": 1 / 2, "int8": 66 / 256, "int4": 34 / 256}
"""The size of rounded gradients relative to float32, by format. 64 integers share a scale of two bytes."""

EXACT_RANKS = 256
"""The maximum number of ranks for which every size is simulated. With more ranks, only powers of four are simulated."""

SIMULATED_RANKS = 2048
"""The maximum number of ranks to simulate if one host cannot represent all hosts. Above this, closed forms are used."""

_ON_ONE_HOST = "shared memory"


@dataclass(frozen=True)
class Strategy:
    """The settings of a job that can be changed without changing the model.

    Attributes:
        bucket_nbytes: the maximum bucket sizes, as in `Calibration`.
        overlaps: whether gradients are averaged during the backward pass.
        forwards: the number of forward and backward passes per step; gradients are averaged in the last backward pass.
        wire: the format of gradients sent between hosts, one of `WIRES`; None for unrounded gradients.
        zero: the stage of ZeRO; 0 for DistributedDataParallel.
        period: the number of steps between averages of the parameters; 0 to average gradients in every step.
        algorithm: the algorithm for collectives; None for the fastest.
    """

    bucket_nbytes: tuple[int, ...]
    overlaps: bool
    forwards: int = 1
    wire: str | None = None
    zero: int = 0
    period: int = 0
    algorithm: str | None = None


def measured(calibration: Calibration) -> Strategy:
    """Returns the strategy of the measured script."""
    return Strategy(calibration.bucket_nbytes, calibration.overlaps, calibration.forwards)


class SimulatedTiming(Protocol):
    """The result of a simulated call."""

    @property
    def seconds(self) -> float:
        """The time from the arrival of the last rank until all ranks have completed the call, in seconds."""
        ...


Simulate = Callable[[str, Operation, int, Network], SimulatedTiming]


@dataclass(frozen=True)
class TimedCall:
    """A call, with the algorithm that the engine would choose and the duration in seconds."""

    algorithm: str
    seconds: float


class CallTimes:
    """Durations of collectives on one network. Each distinct call is simulated only once.

    Args:
        network: the hosts and their links.
        host_calls: the all-reduces measured on one host.
        simulate: `simulate_call` from `comm/schedule/simulation.py`.
    """

    def __init__(self, network: Network, host_calls: Sequence[HostCall], simulate: Simulate) -> None:
        self.network = network
        self._host_calls = tuple(host_calls)
        self._simulate = simulate
        self._hosts = [list(ranks) for ranks in network.hosts]
        self.ranks = sum(map(len, self._hosts))
        self._known: dict[tuple[str, Operation, int, str | None], float] = {}
        self._factor = 1.0

    def scaled(self, factor: float) -> CallTimes:
        """Returns these durations multiplied by a factor. The cache of simulated calls is shared."""
        changed = copy.copy(self)
        changed._factor = self._factor * factor
        return changed

    def call(
        self, operation: Operation, nbytes: int, *, algorithm: str | None = None, wire: str | None = None
    ) -> TimedCall:
        """Returns the duration of a call.

        Args:
            operation: the name of the collective.
            nbytes: the size of the largest buffer on a rank, as in `schedule.algorithms.predict`.
            algorithm: the algorithm to use if it supports the operation; None for the engine's choice.
            wire: the format of data sent between hosts; None for unrounded data.
        """
        found = self._call(operation, nbytes, algorithm, wire)
        return found if self._factor == 1 else replace(found, seconds=found.seconds * self._factor)

    def _call(self, operation: Operation, nbytes: int, algorithm: str | None, wire: str | None) -> TimedCall:
        if self.ranks == 1 or nbytes == 0:
            return TimedCall("none", 0.0)
        if len(self._hosts) == 1 and algorithm is None and self._host_calls:
            return TimedCall(_ON_ONE_HOST, self._on_one_host(operation, nbytes))
        if wire is not None and len(self._hosts) > 1:
            return TimedCall(wire, self._packed(wire, operation, nbytes))
        name = self._chosen(operation, nbytes, algorithm)
        return TimedCall(name, self._simulated(name, operation, nbytes, None))

    def _chosen(self, operation: Operation, nbytes: int, algorithm: str | None) -> str:
        """Returns `algorithm` if it supports the operation, otherwise the engine's choice."""
        choice = choose(self.network.cost_model(), operation, nbytes, self.ranks, self._hosts)
        offered = [candidate.algorithm for candidate in choice.candidates]
        return algorithm if algorithm in offered else offered[0]

    def _packed(self, wire: str, operation: Operation, nbytes: int) -> float:
        """Returns the duration of a quantized call; in a large world, a hierarchical call serves as an approximation.

        In a large world, an exact simulation would take too long, because a quantized call exchanges data between all
        pairs of hosts.
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
            network = self.network if wire is None else with_bandwidth_factor(self.network, 1 / WIRES[wire])
            folds = network.is_uniform and operation in ALIKE.get(algorithm, ())
            if self.ranks <= SIMULATED_RANKS or folds:
                self._known[key] = self._simulate(algorithm, operation, nbytes, network).seconds
            else:
                self._known[key] = predict(network.cost_model(), algorithm, operation, nbytes, self.ranks, self._hosts)
        return self._known[key]

    def _on_one_host(self, operation: Operation, nbytes: int) -> float:
        """Returns the duration based on measured all-reduces; a reduce-scatter or all-gather takes about half of it."""
        seconds = interpolated(self._host_calls, self.ranks, nbytes)
        return seconds if operation is Operation.ALL_REDUCE else seconds / 2


def with_bandwidth_factor(network: Network, times: float) -> Network:
    """Returns the network with the link rates between hosts multiplied by `times`, to model packed data."""
    return map_links(network, lambda link: replace(link, bytes_per_s=link.bytes_per_s * times))


def map_links(network: Network, change: Callable[[NetworkLink], NetworkLink]) -> Network:
    """Returns the network with `change` applied to all links between hosts."""
    return replace(
        network,
        node=change(network.node),
        groups=tuple(replace(group, uplink=change(group.uplink)) for group in network.groups),
        pairs={pair: change(link) for pair, link in network.pairs.items()},
        nodes={host: change(link) for host, link in network.nodes.items()},
    )


def interpolated(calls: Sequence[HostCall], ranks: int, nbytes: int) -> float:
    """Returns the duration of an all-reduce on one host in seconds, interpolated between the measured sizes.

    Below the smallest measured size, the duration is constant. Above the largest measured size, the duration is
    proportional to the size. If `ranks` was not measured, the duration for the nearest number of ranks is scaled by the
    ratio of the two numbers, because ranks share the memory bandwidth.
    """
    nearest = min({call.ranks for call in calls}, key=lambda measured: (abs(measured - ranks), measured))
    points = sorted((call.nbytes, call.seconds) for call in calls if call.ranks == nearest)
    more = ranks / nearest
    sizes = [size for size, _ in points]
    index = bisect_left(sizes, nbytes)
    if index == 0:
        return points[0][1] * more
    if index == len(points):
        return points[-1][1] * nbytes / sizes[-1] * more
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    return (low_s + (high_s - low_s) * (nbytes - low) / (high - low)) * more


@dataclass(frozen=True)
class PlannedBucket:
    """A gradient bucket: its size, and the seconds from the start of the backward pass until the bucket can be sent."""

    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class StepTime:
    """The parts of a step, in seconds.

    Attributes:
        data_s: the time that a rank spends waiting for the loader.
        forward_s: the duration of all forward passes.
        backward_s: the duration of all backward passes.
        exposed_s: the time that ranks spend waiting for communication.
        optimizer_s: the duration of the optimizer step.
        rest_s: the duration of everything else.
        communication_s: the time during which the network is in use.
        algorithm: the algorithm used by the largest call.
    """

    data_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    rest_s: float
    communication_s: float
    algorithm: str

    @property
    def computing_s(self) -> float:
        """The duration of the parts that do not depend on other ranks."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.rest_s

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return self.computing_s + self.exposed_s

    @property
    def overlap(self) -> float:
        """The fraction of communication that overlaps with computation; 1 without communication."""
        return max(0.0, 1 - self.exposed_s / self.communication_s) if self.communication_s else 1.0


def buckets_of(gradients: Sequence[MeasuredGradient], caps_nbytes: Sequence[int]) -> list[PlannedBucket]:
    """Returns the buckets that `DistributedDataParallel` would create, in the order in which they are sent."""
    sizes, dtypes = [gradient.nbytes for gradient in gradients], [gradient.dtype for gradient in gradients]
    planned: list[PlannedBucket] = []
    latest_s = 0.0
    for bucket in make_buckets(sizes, dtypes, caps_nbytes):
        latest_s = max(latest_s, *(gradients[index].ready_s for index in bucket.params))
        planned.append(PlannedBucket(bucket.nbytes, latest_s))
    return planned


def step_of(calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float = 1.0) -> StepTime:
    """Computes the duration of a step.

    Args:
        calibration: the measurements of one rank.
        strategy: the strategy of the job.
        times: the durations of collectives on the job's network.
        factor: the ratio of the slowest rank's computing time to the measured time.
    """
    alone = calibration.times
    forwards = strategy.forwards
    optimizer_s = alone.optimizer_s * factor / (times.ranks if strategy.zero else 1)
    before_s = _before_forward(calibration, strategy, times)
    if strategy.period:
        used_s, exposed_s, algorithm = _diloco(calibration, strategy, times, factor)
    elif strategy.zero:
        used_s, exposed_s, algorithm = _zero(calibration, strategy, times, factor)
    else:
        used_s, exposed_s, algorithm = _averaging(calibration, strategy, times, factor, Operation.ALL_REDUCE)
    return StepTime(
        data_s=alone.data_s * factor,
        forward_s=forwards * alone.forward_s * factor,
        backward_s=forwards * alone.backward_s * factor,
        exposed_s=before_s + exposed_s,
        optimizer_s=optimizer_s,
        rest_s=alone.rest_s * factor,
        communication_s=before_s + used_s,
        algorithm=algorithm,
    )


def _before_forward(calibration: Calibration, strategy: Strategy, times: CallTimes) -> float:
    """Returns the duration of the buffer broadcast before the forward pass, in seconds."""
    if strategy.period or not calibration.buffer_nbytes:
        return 0.0
    return times.call(Operation.BROADCAST, calibration.buffer_nbytes, algorithm=strategy.algorithm).seconds


def _averaging(
    calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float, operation: Operation
) -> tuple[float, float, str]:
    """Returns the communication time, the part exposed after the backward pass (both in seconds), and the algorithm."""
    backward_s = calibration.times.backward_s * factor
    buckets = buckets_of(calibration.gradients, strategy.bucket_nbytes)
    free_s = used_s = 0.0
    largest = max(buckets, key=lambda bucket: bucket.nbytes, default=PlannedBucket(0, 0.0))
    algorithm = "none"
    for number, bucket in enumerate(buckets):
        call = times.call(operation, bucket.nbytes, algorithm=strategy.algorithm, wire=strategy.wire)
        early = strategy.overlaps and number < len(buckets) - 1
        ready_s = min(bucket.ready_s * factor, backward_s) if early else backward_s
        free_s = max(ready_s, free_s) + call.seconds
        used_s += call.seconds
        algorithm = call.algorithm if bucket is largest else algorithm
    return used_s, max(0.0, free_s - backward_s), algorithm


def _zero(calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float) -> tuple[float, float, str]:
    """Returns the values of `_averaging` for ZeRO, including gathers after a step or, in stage 3, before each use."""
    operation = Operation.ALL_REDUCE if strategy.zero == 1 else Operation.REDUCE_SCATTER
    used_s, exposed_s, algorithm = _averaging(calibration, strategy, times, factor, operation)
    gather = times.call(Operation.ALL_GATHER, calibration.memory.parameter_nbytes, algorithm=strategy.algorithm).seconds
    if strategy.zero < 3:
        return used_s + gather, exposed_s + gather, algorithm
    gathers = 2 * strategy.forwards
    hidden_s = min(gather, calibration.times.forward_s * factor) if strategy.overlaps else 0.0
    return used_s + gathers * gather, exposed_s + gathers * (gather - hidden_s), algorithm


def _diloco(calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float) -> tuple[float, float, str]:
    """Returns the values of `_averaging` for DiLoCo, which exchanges all parameters during the next `period` steps."""
    nbytes = calibration.memory.parameter_nbytes
    call = times.call(Operation.ALL_REDUCE, nbytes, algorithm=strategy.algorithm, wire=strategy.wire)
    left_s = max(0.0, call.seconds - strategy.period * calibration.alone_s * factor)
    return call.seconds / strategy.period, left_s / strategy.period, call.algorithm
