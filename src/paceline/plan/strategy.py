"""How a job would train: what can be chosen without another model, and therefore tried in a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.calibration import Calibration

WIRES = {"bf16": 1 / 2, "int8": 66 / 256, "int4": 34 / 256}
"""The bytes that float32 gradients take between hosts; 64 integers share a scale of two bytes."""


@dataclass(frozen=True)
class Strategy:
    """The choices of a job.

    Attributes:
        bucket_nbytes: as in `Calibration`.
        overlaps: whether gradients are averaged while backward goes on.
        forwards: forwards and backwards in a step, of which the last averages.
        wire: what is sent between hosts, one of `WIRES`; None for the gradients as they are.
        zero: the stage of ZeRO; 0 for DistributedDataParallel.
        period: after how many steps ranks average their parameters; 0 if they average gradients in each.
        algorithm: the collectives' algorithm; None for the fastest.
    """

    bucket_nbytes: tuple[int, ...]
    overlaps: bool
    forwards: int = 1
    wire: str | None = None
    zero: int = 0
    period: int = 0
    algorithm: str | None = None


def measured(calibration: Calibration) -> Strategy:
    """Returns how the measured script trains."""
    return Strategy(calibration.bucket_nbytes, calibration.overlaps, calibration.forwards)
