"""The part of `paceline plan` that says what failures cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.calibration import Calibration
    from paceline.plan.predicting import Prediction
    from paceline.plan.survival.goodput import Goodput
    from paceline.plan.survival.timings import Timings

_STAND_IN_BYTES_PER_S = 1e9  # at which state is copied if no link between hosts is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    failing = parser.add_argument_group("failures")
    failing.add_argument(
        "--failures", metavar="TIMES", help="mean times between them, such as machine=30d,worker=90d,job=60d"
    )
    failing.add_argument("--times", metavar="TIMES", default="", help="such as repair=10min,saving=2s,restarting=5min")


def results(
    options: argparse.Namespace, calibration: Calibration, predictions: Sequence[Prediction]
) -> tuple[list[Goodput], Timings]:
    """Returns what becomes of each job's time, and the times of the largest one.

    Raises:
        ValueError: a flag has another form, or a time is impossible.
    """
    from paceline.plan.survival.goodput import goodput
    from paceline.plan.survival.spelling import parse_failures, parse_times
    from paceline.plan.survival.timings import Timings

    memory, node = calibration.memory, calibration.links.node
    state_nbytes = memory.parameter_nbytes + memory.optimizer_nbytes
    copying_s = state_nbytes / (_STAND_IN_BYTES_PER_S if node is None else node.bytes_per_s)
    failures, found = parse_failures(options.failures), []
    for each in predictions:
        times = parse_times(options.times, Timings(step_s=each.step.seconds, copying_s=copying_s))
        found.append(goodput(each.nodes, each.per_node, times, failures))
    return found, times
