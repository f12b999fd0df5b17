"""One step of data-parallel training: when each bucket is ready, sent and averaged, and how much of that is exposed.

A step on a rank is data, forwards, backwards, optimizer and the rest, one after the other. Buckets are averaged one at
a time and strictly in their order, as `parallel/ddp/reducer.py` does it: while backward goes on, each as soon as it is
full, but for the last one, and all others when backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parallel.ddp.buckets import make_buckets
from paceline.plan.calibration import Calibration, Gradient
from paceline.plan.collectives import CallTimes
from paceline.plan.strategy import Strategy
from paceline.schedule.steps import Operation


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of gradients: its bytes, and when it can be sent, counted from the beginning of backward."""

    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class Step:
    """The parts of a step, in seconds.

    Attributes:
        exposed_s: what ranks spend waiting for communication; `communication_s` how long the network is used.
        algorithm: what the largest call uses.
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
        """What a rank does by itself."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.rest_s

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.computing_s + self.exposed_s

    @property
    def overlap(self) -> float:
        """The share of the communication that is hidden behind computing; 1 if there is none."""
        return max(0.0, 1 - self.exposed_s / self.communication_s) if self.communication_s else 1.0


def buckets_of(gradients: Sequence[Gradient], caps_nbytes: Sequence[int]) -> list[PlannedBucket]:
    """Returns the buckets as `DistributedDataParallel` makes them; a bucket is sent after those before it."""
    made = make_buckets([each.nbytes for each in gradients], [each.dtype for each in gradients], caps_nbytes)
    planned: list[PlannedBucket] = []
    latest_s = 0.0
    for bucket in made:
        latest_s = max(latest_s, *(gradients[at].ready_s for at in bucket.params))
        planned.append(PlannedBucket(bucket.nbytes, latest_s))
    return planned


def step_of(calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float = 1.0) -> Step:
    """Returns a step.

    Args:
        calibration: what was measured on one rank.
        strategy: how the job trains.
        times: the collectives of the job's network.
        factor: by how much the slowest rank computes longer than the measured one.
    """
    alone = calibration.times
    forwards = strategy.forwards
    optimizer_s = alone.optimizer_s * factor / (times.ranks if strategy.zero else 1)
    before_s = _before_forward(calibration, strategy, times)
    if strategy.period:
        used_s, exposed_s, algorithm = _averaging_now_and_then(calibration, strategy, times, factor)
    elif strategy.zero:
        used_s, exposed_s, algorithm = _zero(calibration, strategy, times, factor)
    else:
        used_s, exposed_s, algorithm = _averaging(calibration, strategy, times, factor, Operation.ALL_REDUCE)
    return Step(
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
    """Returns the seconds in which rank 0's buffers are copied, before the forward whose backward averages."""
    if strategy.period or not calibration.buffer_nbytes:
        return 0.0
    return times.call(Operation.BROADCAST, calibration.buffer_nbytes, algorithm=strategy.algorithm).seconds


def _averaging(
    calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float, operation: Operation
) -> tuple[float, float, str]:
    """Returns for how long the network is used, how much longer than backward that takes, and the algorithm."""
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
    """Returns the same of ZeRO, which collects the parameters after each step, or in stage 3 before each use."""
    operation = Operation.ALL_REDUCE if strategy.zero == 1 else Operation.REDUCE_SCATTER
    used_s, exposed_s, algorithm = _averaging(calibration, strategy, times, factor, operation)
    gather = times.call(Operation.ALL_GATHER, calibration.memory.parameter_nbytes, algorithm=strategy.algorithm).seconds
    if strategy.zero < 3:
        return used_s + gather, exposed_s + gather, algorithm
    gathers = 2 * strategy.forwards
    hidden_s = min(gather, calibration.times.forward_s * factor) if strategy.overlaps else 0.0
    return used_s + gathers * gather, exposed_s + gathers * (gather - hidden_s), algorithm


def _averaging_now_and_then(
    calibration: Calibration, strategy: Strategy, times: CallTimes, factor: float
) -> tuple[float, float, str]:
    """Returns the same of DiLoCo, whose exchange of all parameters goes on beside `period` steps."""
    call = times.call(
        Operation.ALL_REDUCE,
        calibration.memory.parameter_nbytes,
        algorithm=strategy.algorithm,
        wire=strategy.wire,
    )
    left_s = max(0.0, call.seconds - strategy.period * calibration.alone_s * factor)
    return call.seconds / strategy.period, left_s / strategy.period, call.algorithm
