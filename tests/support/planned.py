"""A small job whose predictions can be computed by hand, for tests of `paceline plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.comm.schedule.network import Network, NetworkLink
from paceline.comm.schedule.steps import Operation
from paceline.operate.plan.calibration import (
    Calibration,
    Links,
    MeasuredGradient,
    MeasuredMemory,
    MeasuredTimes,
    Origin,
    network_of,
)
from paceline.operate.plan.prediction import JobPrediction, predict
from paceline.operate.plan.step_time import WIRES, Strategy, measured

MB = 1_000_000
LINKS = Links(NetworkLink(1e-6, 1e10), NetworkLink(1e-3, 1e9), None, 0.0)


@dataclass(frozen=True)
class Timing:
    seconds: float


def simulate(algorithm: str, operation: Operation, nbytes: int, network: Network) -> Timing:
    """Predicts that a call takes the latency of a host's link plus the time for one transfer of the call's bytes."""
    return Timing(network.node.latency_s + nbytes * WIRES.get(algorithm, 1.0) / network.node.bytes_per_s)


def calibration(**changed: object) -> Calibration:
    """Returns a calibration with three gradients of 10 MB, ready after 10, 20 and 30 ms, in reverse order."""
    base = Calibration(
        version=1,
        origin=Origin(("train.py",), "2026-11-22", "h0", 2, 1, 1, {}),
        times=MeasuredTimes(data_s=0.0, forward_s=0.015, backward_s=0.030, optimizer_s=0.005, rest_s=0.0),
        step_s=(0.050,),
        samples=32.0,
        forwards=1,
        gradients=tuple(
            MeasuredGradient(name, 10 * MB, "float32", ready_s)
            for name, ready_s in (("first", 0.030), ("second", 0.020), ("third", 0.010))
        ),
        bucket_nbytes=(10 * MB,),
        overlaps=True,
        buffer_nbytes=0,
        memory=MeasuredMemory(30 * MB, 30 * MB, 60 * MB, 100 * MB),
        links=LINKS,
    )
    return replace(base, **changed)


def prediction(found: Calibration, nodes: int = 2, strategy: Strategy | None = None) -> JobPrediction:
    return predict(found, network_of(found.links, nodes, 1), strategy or measured(found), simulate)
