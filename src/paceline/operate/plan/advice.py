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
    """Returns the number of forward passes per second over all ranks; samples per second are proportional to it."""
    return prediction.ranks * prediction.strategy.forwards / prediction.step.seconds


def changes(now: JobPrediction, calibration: Calibration) -> Iterator[Change]:
    """Yields every applicable change to a job; each differs from the job in one setting."""
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
