"""What all engines that run schedules share: the algorithms' names, and by which size and costs one is chosen."""

from __future__ import annotations

import json

from paceline.schedule.cost import CostModel, LinkCost
from paceline.schedule.registry import ALGORITHMS

ALGORITHM_NAMES = tuple(ALGORITHMS)
ALGORITHM_VARIABLE = "PACELINE_ALGORITHM"
COSTS_VARIABLE = "PACELINE_COSTS"
STREAMS_VARIABLE = "PACELINE_STREAMS"

_MOST_STREAMS = 64

ALL_TO_ALL_NBYTES = 1 << 20
"""The size that is assumed for every all_to_all.

A rank does not know the sizes of the others' parts, and all must choose the same algorithm.
"""

# Shared memory within a host, and fast Ethernet between hosts.
UNMEASURED = CostModel(LinkCost(2e-6, 1e-10), LinkCost(3e-5, 5e-10), 1e-10)


def known_algorithm(algorithm: str | None) -> str | None:
    """Returns `algorithm` as it is, once it is known to exist; None stands for the fastest.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm is not None and algorithm not in ALGORITHM_NAMES:
        raise ValueError(
            f"the algorithm is {algorithm!r} (an argument, or {ALGORITHM_VARIABLE}); it must be one of "
            f"{', '.join(ALGORITHM_NAMES)}, or nothing for the fastest"
        )
    return algorithm


def parse_costs(text: str) -> CostModel:
    """Returns the costs that PACELINE_COSTS says.

    Raises:
        ValueError: the text does not have the variable's form.
    """
    try:
        data = json.loads(text)
        return CostModel(LinkCost(*data["within_host"]), LinkCost(*data["between_hosts"]), float(data["gamma"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{COSTS_VARIABLE} is {text!r}; it must be JSON like "
            '{"within_host": [2e-6, 1e-10], "between_hosts": [3e-5, 5e-10], "gamma": 1e-10}'
        ) from error


def parse_streams(text: str) -> int:
    """Returns the number of connections between two hosts that PACELINE_STREAMS says.

    Raises:
        ValueError: it is no such number.
    """
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_STREAMS:
        raise ValueError(f"{STREAMS_VARIABLE} is {text!r}; it must be a number from 1 to {_MOST_STREAMS}")
    return int(text)
