"""The algorithms by name. A new one is a file beside this with its `OFFERS`, and one line here.

The tests then prove it; they also ask for its closed forms in `formulas.py`, without which it cannot be weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.schedule import halving_doubling, hierarchical, ring, star, tree
from paceline.schedule.steps import OPERATIONS, ROOTED, Builder, Operation, Place, Schedule

ALGORITHMS: dict[str, Mapping[Operation, Builder]] = {
    "ring": ring.OFFERS,
    "halving_doubling": halving_doubling.OFFERS,
    "tree": tree.OFFERS,
    "star": star.OFFERS,
    "hierarchical": hierarchical.OFFERS,
}


def offers(operation: Operation) -> list[str]:
    """Return the names of the algorithms that have the operation."""
    return [name for name, offered in ALGORITHMS.items() if operation in offered]


def build(
    algorithm: str,
    operation: Operation,
    rank: int,
    world_size: int,
    root: int = -1,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Return what `rank` does in the operation by the algorithm.

    `root` is a rank for broadcast, reduce, gather and scatter, else -1. `hosts` lists the ranks of each host; only
    `hierarchical` looks at it, and needs it. Raises ValueError for a name or a number that does not fit.
    """
    builder = _builder(algorithm, operation)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}: give a rank of 0 to {world_size - 1}")
    if operation in ROOTED and not 0 <= root < world_size:
        raise ValueError(f"{operation} needs a root of 0 to {world_size - 1}, but root is {root}")
    if operation not in ROOTED and root != -1:
        raise ValueError(f"{operation} has no root, but root is {root}: leave it out")
    blocks, steps = builder(Place(rank, world_size, root, hosts or ()))
    return Schedule(operation, algorithm, rank, world_size, root, blocks, tuple(steps))


def _builder(algorithm: str, operation: Operation) -> Builder:
    if operation not in OPERATIONS:
        raise ValueError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if operation not in ALGORITHMS[algorithm]:
        raise ValueError(f"{algorithm} has no {operation}; these have: {', '.join(offers(operation))}")
    return ALGORITHMS[algorithm][operation]
