"""Advice: changes to a job, each predicted separately and ranked by its gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.operate.plan.calibration import Calibration
from paceline.operate.plan.prediction import JobPrediction, Networks, predict
from paceline.operate.plan.step_time import WIRES, CallTimes, Simulate, Strategy

_MIB = 1 << 20
_BUCKETS_MIB = (1, 5, 25, 100)
_PERIOD = 16
_WORTH_SAYING = 0.01  # as a share of the rate
_MEMORY_WORTH_SAYING = 0.05


@dataclass(frozen=True)
class Change:
    """A change to a job.

    Attributes:
        what: the change, as it would be made in a script or a command.
        but: its disadvantage, or an effect that the prediction ignores; "" for none.
        strategy: the strategy of the changed job.
        per_node: the number of ranks per host with the change.
    """

    what: str
    but: str
    strategy: Strategy
    per_node: int


@dataclass(frozen=True)
class Advice:
    """A change with its prediction and its gain.

    Attributes:
        change: the change.
        prediction: the prediction for the changed job.
        gain: the relative increase of the rate in samples per second.
        saved_nbytes: the bytes of a rank's memory that the change saves.
    """

    change: Change
    prediction: JobPrediction
    gain: float
    saved_nbytes: int


def advise(calibration: Calibration, now: JobPrediction, networks: Networks, simulate: Simulate) -> list[Advice]:
    """Returns the changes that gain at least a hundredth of the rate, or save memory, with the largest gain first.

    Args:
        calibration: the measurements of one rank.
        now: the job without changes.
        networks: a function that returns the network for a number of hosts and a number of ranks per host.
        simulate: `simulate_call` of `comm/schedule/simulation.py`.
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
    """Returns the forwards per second of all ranks of a job, to which samples per second are proportional."""
    return prediction.ranks * prediction.strategy.forwards / prediction.step.seconds


def changes(now: JobPrediction, calibration: Calibration) -> Iterator[Change]:
    """Yields the single changes that are possible in a job."""
    base, per_node = now.strategy, now.per_node
    if now.ranks == 1:
        return
    if not base.zero and not base.period:
        yield from _buckets(base, per_node, calibration.gradient_nbytes)
        if not base.overlaps:
            yield Change(
                "overlap=True", "each rank needs a core besides those that it computes on",
                replace(base, overlaps=True), per_node,
            )  # fmt: skip
        for times in (2, 4):
            yield Change(
                f"accumulate {times * base.forwards} backwards in a step (no_sync)",
                f"the batch of a step is {times} times as large",
                replace(base, forwards=times * base.forwards),
                per_node,
            )
        yield Change(
            f"DiLoCo(every={_PERIOD})", "ranks train on parameters of their own between exchanges; compare the loss",
            replace(base, period=_PERIOD), per_node,
        )  # fmt: skip
        for stage in (1, 2, 3):
            yield Change(f"ZeroRedundancyOptimizer, stage {stage}", "", replace(base, zero=stage), per_node)
    if base.wire is None and now.nodes > 1 and base.zero == 0:
        for wire in WIRES:
            but = "gradients are rounded between hosts; the time of rounding is not counted"
            yield Change(f'wire="{wire}"', but, replace(base, wire=wire), per_node)
    if now.nodes > 1 and now.step.algorithm in ("ring", "hierarchical") and per_node > 1:
        other = "hierarchical" if now.step.algorithm == "ring" else "ring"
        yield Change(f'algorithm="{other}"', "", replace(base, algorithm=other), per_node)
    if per_node > 1 and now.nodes > 1:
        but = "a rank is taken to compute as fast as before"
        yield Change(f"{per_node // 2} ranks per node", but, base, per_node // 2)


def _buckets(base: Strategy, per_node: int, gradient_nbytes: int) -> Iterator[Change]:
    for size in _BUCKETS_MIB:
        caps = (min(_MIB, size * _MIB), size * _MIB)
        if size * _MIB < 4 * gradient_nbytes and caps != base.bucket_nbytes:
            yield Change(f"bucket_cap_mb={size}", "", replace(base, bucket_nbytes=caps), per_node)
