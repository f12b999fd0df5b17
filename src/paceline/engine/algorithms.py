"""What all engines that run schedules share: the algorithms' names, and by which size and costs one is chosen."""

from __future__ import annotations

from paceline.schedule.cost import CostModel, LinkCost
from paceline.schedule.registry import ALGORITHMS

ALGORITHM_NAMES = tuple(ALGORITHMS)
ALGORITHM_VARIABLE = "PACELINE_ALGORITHM"

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
