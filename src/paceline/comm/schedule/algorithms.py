"""The algorithms, their predicted durations for a call, and the selection of the fastest one.

To add an algorithm, add a file that defines `OFFERS` and `COSTS` to this folder, and a line to this file. The tests
then prove the algorithm's schedules and compare its costs with a simulation. Each algorithm's `COSTS` contains
closed-form expressions for its durations, based on the cost model in `cost_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from paceline.comm.schedule import circulant, halving_doubling, hierarchical, quantized, ring, star, tree
from paceline.comm.schedule.cost_model import Case, Cost, CostModel
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

QUANTIZED = dict.fromkeys(quantized.WIRES, quantized.OFFERS)
"""The operations that each quantized format supports. Only the caller selects such a format, never the cost model."""

SYNTHESIZED = "synthesized"
"""The algorithm name for schedules that `synthesis.py` creates."""

_SYNTHESIZED_NUMBER = 63
_QUANTIZED_FROM = 64  # kQuantized in native/call/call.hpp

COSTS = {name: costs for name, (_, costs) in _ENTRIES.items()}
"""For each algorithm, its operations and the closed-form expressions for their durations, in seconds."""

ALIKE: dict[str, frozenset[Operation]] = {
    "ring": ring.ALIKE,
    "hierarchical": hierarchical.ALIKE,
    "circulant": circulant.ALIKE,
}
"""For each algorithm, the operations in which equal hosts perform the same steps relative to their position."""

_NAMES = {
    **dict(enumerate(ALGORITHMS, 1)),
    _SYNTHESIZED_NUMBER: SYNTHESIZED,
    **dict(enumerate(QUANTIZED, _QUANTIZED_FROM + 1)),
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
    return [*QUANTIZED].index(algorithm) + 1 if algorithm in QUANTIZED else 0


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
    """Builds a rank's schedule.

    Args:
        algorithm: the name of the algorithm or, for a quantized schedule, of the wire format between hosts.
        rank: the rank whose schedule to build.
        root: the root of a broadcast, reduce, gather or scatter; -1 for other operations.
        hosts: the ranks on each host; required by `hierarchical`, `circulant` and quantized formats, and ignored by
            other algorithms.

    Raises:
        ValueError: a name is unknown, or a number is out of range.
    """
    builder = _builder(algorithm, operation)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size} ranks: pass a rank from 0 to {world_size - 1}")
    if operation in ROOTED and not 0 <= root < world_size:
        raise ValueError(f"{operation} requires a root from 0 to {world_size - 1}, but root is {root}")
    if operation not in ROOTED and root != -1:
        raise ValueError(f"{operation} has no root, but root is {root}: leave it out")
    blocks, steps = builder(RankTopology(rank, world_size, root, hosts or ()))
    return Schedule(operation, algorithm, rank, world_size, root, blocks, tuple(steps))


def _builder(algorithm: str, operation: Operation) -> Builder:
    builders = ALGORITHMS.get(algorithm) or QUANTIZED.get(algorithm)
    if builders is None:
        raise ValueError(f"unknown algorithm {algorithm!r}; the algorithms are {', '.join(ALGORITHMS)}")
    if operation not in builders:
        raise ValueError(
            f"{algorithm} does not support {operation}; these do: {', '.join(algorithms_offering(operation))}"
        )
    return builders[operation]


@dataclass(frozen=True)
class AlgorithmPrediction:
    """The predicted duration of one algorithm."""

    algorithm: str
    seconds: float


class PreferredAlgorithm(NamedTuple):
    """An algorithm that is chosen although another one is predicted to be slightly faster, and the reason."""

    prediction: AlgorithmPrediction
    merit: str


@dataclass(frozen=True)
class AlgorithmChoice:
    """The algorithm chosen for a call, all candidates from fastest to slowest, and the reason for the choice."""

    operation: Operation
    nbytes: int
    world_size: int
    n_hosts: int
    algorithm: str
    candidates: tuple[AlgorithmPrediction, ...]
    reason: str

    @cached_property
    def seconds(self) -> float:
        """The predicted duration of the chosen algorithm."""
        return next(candidate.seconds for candidate in self.candidates if candidate.algorithm == self.algorithm)


def predict(
    model: CostModel,
    algorithm: str,
    operation: Operation,
    nbytes: int,
    world_size: int,
    hosts: Sequence[Sequence[int]] | None = None,
) -> float:
    """Returns the predicted duration of the algorithm, in seconds.

    Args:
        nbytes: the size in bytes of a rank's longest buffer: the tensor, or all blocks of a gather, a scatter or an
            all-to-all.
        hosts: the ranks on each host; None if all ranks are on one host.

    Raises:
        ValueError: the algorithm does not implement the operation, or `hosts` does not contain `world_size` ranks.
    """
    sizes = tuple(len(host) for host in hosts) if hosts else (world_size,)
    if sum(sizes) != world_size or not all(sizes):
        raise ValueError(f"hosts of {sizes} ranks do not add up to a world of {world_size}")
    if operation not in COSTS.get(algorithm, {}):
        raise ValueError(
            f"{algorithm!r} does not support {operation}; these do: {', '.join(algorithms_offering(operation))}"
        )
    return COSTS[algorithm][operation](Case(model, nbytes, sizes))


def choose(
    model: CostModel,
    operation: Operation,
    nbytes: int,
    world_size: int,
    hosts: Sequence[Sequence[int]] | None = None,
    forced: str | None = None,
) -> AlgorithmChoice:
    """Returns the fastest algorithm for the call, or `forced`, with the predicted durations of all candidates.

    See `predict` for the other arguments.

    Raises:
        ValueError: `forced` is not an algorithm, or does not implement the operation.
    """
    times = [
        AlgorithmPrediction(name, predict(model, name, operation, nbytes, world_size, hosts))
        for name in algorithms_offering(operation)
    ]
    # Durations are rounded, so that rounding errors do not decide between algorithms with the same prediction. Of such
    # algorithms, the first one in the registry is chosen.
    candidates = tuple(sorted(times, key=lambda prediction: float(f"{prediction.seconds:.9g}")))
    return forced_or_best(operation, nbytes, world_size, len(hosts or [0]), candidates, forced)


def forced_or_best(
    operation: Operation,
    nbytes: int,
    world_size: int,
    n_hosts: int,
    candidates: tuple[AlgorithmPrediction, ...],
    forced: str | None,
    preferred: PreferredAlgorithm | None = None,
) -> AlgorithmChoice:
    """Chooses the forced algorithm, if any; otherwise the preferred one, if any; otherwise the fastest.

    Args:
        candidates: the algorithms from the fastest to the slowest.
        preferred: an algorithm to choose in place of the fastest because it is nearly as fast, or None.

    Raises:
        ValueError: `forced` is not an algorithm, or does not implement the operation.
    """
    if forced:
        chosen, why = _forced(forced, operation, candidates), "is forced"
    elif preferred and preferred.prediction != candidates[0]:
        chosen, why = preferred.prediction, f"is about as fast as any, and {preferred.merit}"
    else:
        chosen, why = candidates[0], "is predicted to be the fastest"
    reason = _reason(chosen, candidates, why)
    return AlgorithmChoice(operation, nbytes, world_size, n_hosts, chosen.algorithm, candidates, reason)


def _reason(chosen: AlgorithmPrediction, candidates: Sequence[AlgorithmPrediction], why: str) -> str:
    others = [candidate for candidate in candidates if candidate != chosen]
    if not others:
        return f"{chosen.algorithm} is the only algorithm that supports the operation"
    own_s, other_s = format_seconds(chosen.seconds), format_seconds(others[0].seconds)
    return (
        f"{chosen.algorithm} {why}: it takes {own_s}, and the best of the others, {others[0].algorithm}, takes "
        f"{other_s}"
    )


def _forced(name: str, operation: Operation, candidates: Sequence[AlgorithmPrediction]) -> AlgorithmPrediction:
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; the algorithms are {', '.join(ALGORITHMS)}")
    for candidate in candidates:
        if candidate.algorithm == name:
            return candidate
    raise ValueError(f"{name} does not support {operation}; these do: {', '.join(algorithms_offering(operation))}")


def explain_text(choice: AlgorithmChoice) -> str:
    """Returns a table of all candidates, the reason for the choice, and a comparison with a star."""
    hosts = "1 host" if choice.n_hosts == 1 else f"{choice.n_hosts} hosts"
    lines = [f"{choice.operation} of {choice.nbytes:,} bytes on {choice.world_size} ranks, {hosts}", ""]
    fastest = choice.candidates[0].seconds
    for candidate in choice.candidates:
        mark = "->" if candidate.algorithm == choice.algorithm else "  "
        times = f"{candidate.seconds / fastest:8.1f}x" if fastest else ""
        lines.append(f"{mark} {candidate.algorithm:<18}{format_seconds(candidate.seconds):>10}{times}")
    return "\n".join([*lines, "", choice.reason, _about_star(choice)]).rstrip() + "\n"


def _about_star(choice: AlgorithmChoice) -> str:
    star = next((candidate for candidate in choice.candidates if candidate.algorithm == "star"), None)
    best = choice.candidates[0]
    if star is None:
        return f"A star does not support {choice.operation}, because its data must not pass through a central rank."
    others = choice.world_size - 1
    if star.seconds <= best.seconds:
        return f"A star is not slower here: its central rank serves the {others} other ranks in no more time."
    return (
        f"The star is slower by a factor of {star.seconds / best.seconds:.1f}: its central rank serves {others} other "
        "ranks one after\n"
        "another over one link, while their own links are idle most of the time."
    )


def format_seconds(value: float) -> str:
    """Formats a time with a suitable unit: `12.3 us`, `4.56 ms`, `7.89 s`."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value < 1000 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"
