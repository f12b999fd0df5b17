"""Registry of algorithms, with their names, operations and costs.

To add an algorithm, add a file that defines `OFFERS` and `COSTS` to this folder, and a line to this file. The tests
then prove its schedules and compare its costs with a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from paceline.comm.schedule import circulant, halving_doubling, hierarchical, quantised, ring, star, tree
from paceline.comm.schedule.cost_model import Cost
from paceline.comm.schedule.steps import ROOTED, Builder, Operation, RankTopology, Schedule

_Entry: TypeAlias = tuple[Mapping[Operation, Builder], Mapping[Operation, Cost]]

_ENTRIES: dict[str, _Entry] = {
    "ring": (ring.OFFERS, ring.COSTS),
    "halving_doubling": (halving_doubling.OFFERS, halving_doubling.COSTS),
    "tree": (tree.OFFERS, tree.COSTS),
    "star": (star.OFFERS, star.COSTS),
    "circulant": (circulant.OFFERS, circulant.COSTS),
    "hierarchical": (hierarchical.OFFERS, hierarchical.COSTS),
}

ALGORITHMS = {name: offered for name, (offered, _) in _ENTRIES.items()}
"""For each algorithm, its operations and the functions that build a rank's schedule."""

QUANTISED = dict.fromkeys(quantised.WIRES, quantised.OFFERS)
"""The operations of each quantized format. A format is never chosen by the cost model, only requested by a call."""

SYNTHESISED = "synthesised"
"""The algorithm name of the schedules that `synthesis.py` creates."""

_SYNTHESISED_NUMBER = 63
_QUANTISED_FROM = 64  # kQuantised in native/call/call.hpp

COSTS = {name: costs for name, (_, costs) in _ENTRIES.items()}
"""For each algorithm, its operations and the closed forms of their durations, in seconds."""

ALIKE: dict[str, frozenset[Operation]] = {
    "ring": ring.ALIKE,
    "hierarchical": hierarchical.ALIKE,
    "circulant": circulant.ALIKE,
}
"""For each algorithm, the operations in which equal hosts perform the same steps relative to their position."""

_NAMES = {
    **dict(enumerate(ALGORITHMS, 1)),
    _SYNTHESISED_NUMBER: SYNTHESISED,
    **dict(enumerate(QUANTISED, _QUANTISED_FROM + 1)),
}
_NUMBERS = {name: number for number, name in _NAMES.items()}


def algorithms_offering(operation: Operation) -> list[str]:
    """Returns the names of the algorithms that implement the operation."""
    return [name for name, offered in ALGORITHMS.items() if operation in offered]


def number_of(algorithm: str) -> int:
    """Returns the core's code for an algorithm or a quantized format; 0 denotes a call without an algorithm."""
    return _NUMBERS[algorithm]


def wire_of(algorithm: str) -> int:
    """Returns the code of the algorithm's wire format (native/wire/wire.hpp), or 0 if data is not rounded."""
    return [*QUANTISED].index(algorithm) + 1 if algorithm in QUANTISED else 0


def name_of(number: int) -> str | None:
    """Returns the algorithm or quantized format with the given code, or None if there is none."""
    return _NAMES.get(number)


def build(
    algorithm: str,
    operation: Operation,
    rank: int,
    world_size: int,
    root: int = -1,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Builds the schedule of a rank.

    Args:
        algorithm: the name of the algorithm or, for a quantized schedule, of the wire format between hosts.
        operation: the collective.
        rank: the rank whose schedule to build.
        world_size: the number of ranks.
        root: the root of a broadcast, reduce, gather or scatter; -1 for other operations.
        hosts: the ranks of each host; required by `hierarchical`, `circulant` and quantized formats, ignored by other
            algorithms.

    Raises:
        ValueError: a name is unknown, or a number is out of range.
    """
    builder = _builder(algorithm, operation)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}: give a rank of 0 to {world_size - 1}")
    if operation in ROOTED and not 0 <= root < world_size:
        raise ValueError(f"{operation} needs a root of 0 to {world_size - 1}, but root is {root}")
    if operation not in ROOTED and root != -1:
        raise ValueError(f"{operation} has no root, but root is {root}: leave it out")
    blocks, steps = builder(RankTopology(rank, world_size, root, hosts or ()))
    return Schedule(operation, algorithm, rank, world_size, root, blocks, tuple(steps))


def _builder(algorithm: str, operation: Operation) -> Builder:
    builders = ALGORITHMS.get(algorithm) or QUANTISED.get(algorithm)
    if builders is None:
        raise ValueError(f"there is no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if operation not in builders:
        raise ValueError(f"{algorithm} has no {operation}; these have: {', '.join(algorithms_offering(operation))}")
    return builders[operation]
