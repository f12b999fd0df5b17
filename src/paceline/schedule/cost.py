"""Predicts what each algorithm would take for a call, chooses the fastest, and explains the choice.

The closed forms are the `COSTS` of each algorithm; `cost_model.py` says in which terms they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.schedule.cost_model import Case, CostModel, LinkCost
from paceline.schedule.registry import ALGORITHMS, COSTS, offers
from paceline.schedule.steps import Operation

__all__ = ["Choice", "CostModel", "LinkCost", "Prediction", "choose", "explain_text", "predict"]


@dataclass(frozen=True)
class Prediction:
    """The seconds that one algorithm would take."""

    algorithm: str
    seconds: float


class Preferred(NamedTuple):
    """An algorithm that is taken although another is predicted to be a little faster, and what it has over that."""

    prediction: Prediction
    merit: str


@dataclass(frozen=True)
class Choice:
    """The algorithm for a call, all candidates from the fastest to the slowest, and why."""

    operation: Operation
    nbytes: int
    world_size: int
    n_hosts: int
    algorithm: str
    candidates: tuple[Prediction, ...]
    reason: str

    @cached_property
    def seconds(self) -> float:
        """What the chosen algorithm is predicted to take."""
        return next(each.seconds for each in self.candidates if each.algorithm == self.algorithm)


def predict(
    model: CostModel,
    algorithm: str,
    operation: Operation,
    nbytes: int,
    world_size: int,
    hosts: Sequence[Sequence[int]] | None = None,
) -> float:
    """Returns the seconds that the algorithm takes.

    Args:
        model: the costs of links and reductions.
        algorithm: its name.
        operation: which collective.
        nbytes: the longest buffer of a rank: the tensor, or all blocks of a gather, a scatter, an all-to-all together.
        world_size: the number of ranks.
        hosts: the ranks of each host; without it all ranks are on one host.

    Raises:
        ValueError: the algorithm does not have the operation, or `hosts` does not have `world_size` ranks.
    """
    sizes = tuple(len(host) for host in hosts) if hosts else (world_size,)
    if sum(sizes) != world_size or not all(sizes):
        raise ValueError(f"hosts of {sizes} ranks are not a world of {world_size}")
    if operation not in COSTS.get(algorithm, {}):
        raise ValueError(f"{algorithm!r} has no {operation}; these have: {', '.join(offers(operation))}")
    return COSTS[algorithm][operation](Case(model, nbytes, sizes))


def choose(
    model: CostModel,
    operation: Operation,
    nbytes: int,
    world_size: int,
    hosts: Sequence[Sequence[int]] | None = None,
    forced: str | None = None,
) -> Choice:
    """Returns the fastest algorithm for the call, or `forced`, with what all others would take.

    The arguments are those of `predict`.

    Raises:
        ValueError: `forced` is no algorithm, or does not have the operation.
    """
    times = [Prediction(name, predict(model, name, operation, nbytes, world_size, hosts)) for name in offers(operation)]
    # The times are rounded so that the first one in the registry wins among algorithms that coincide in this case.
    candidates = tuple(sorted(times, key=lambda prediction: float(f"{prediction.seconds:.9g}")))
    return forced_or_best(operation, nbytes, world_size, len(hosts or [0]), candidates, forced)


def forced_or_best(
    operation: Operation,
    nbytes: int,
    world_size: int,
    n_hosts: int,
    candidates: tuple[Prediction, ...],
    forced: str | None,
    preferred: Preferred | None = None,
) -> Choice:
    """Returns the choice of the first candidate, which is the fastest, or of another one.

    Args:
        operation, nbytes, world_size, n_hosts: the call.
        candidates: the algorithms from the fastest to the slowest.
        forced: the algorithm to take; None leaves the choice.
        preferred: one that is about as fast, which is taken instead of the fastest.

    Raises:
        ValueError: `forced` is no algorithm, or does not have the operation.
    """
    if forced:
        chosen, why = _forced(forced, operation, candidates), "is forced"
    elif preferred and preferred.prediction != candidates[0]:
        chosen, why = preferred.prediction, f"is about as fast as any, and {preferred.merit}"
    else:
        chosen, why = candidates[0], "is predicted to be the fastest"
    reason = _reason(chosen, candidates, why)
    return Choice(operation, nbytes, world_size, n_hosts, chosen.algorithm, candidates, reason)


def _reason(chosen: Prediction, candidates: Sequence[Prediction], why: str) -> str:
    others = [candidate for candidate in candidates if candidate != chosen]
    if not others:
        return f"{chosen.algorithm} is the only algorithm that has the operation"
    mine, theirs = spell_seconds(chosen.seconds), spell_seconds(others[0].seconds)
    return f"{chosen.algorithm} {why}: it takes {mine}, and of the others the best, {others[0].algorithm}, {theirs}"


def _forced(name: str, operation: Operation, candidates: Sequence[Prediction]) -> Prediction:
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    for candidate in candidates:
        if candidate.algorithm == name:
            return candidate
    raise ValueError(f"{name} has no {operation}; these have: {', '.join(offers(operation))}")


def explain_text(choice: Choice) -> str:
    """Returns a table of all candidates, the reason for the choice, and why a star loses."""
    hosts = "1 host" if choice.n_hosts == 1 else f"{choice.n_hosts} hosts"
    lines = [f"{choice.operation} of {choice.nbytes:,} bytes on {choice.world_size} ranks, {hosts}", ""]
    fastest = choice.candidates[0].seconds
    for candidate in choice.candidates:
        mark = "->" if candidate.algorithm == choice.algorithm else "  "
        times = f"{candidate.seconds / fastest:8.1f}x" if fastest else ""
        lines.append(f"{mark} {candidate.algorithm:<18}{spell_seconds(candidate.seconds):>10}{times}")
    return "\n".join([*lines, "", choice.reason, _about_star(choice)]).rstrip() + "\n"


def _about_star(choice: Choice) -> str:
    star = next((candidate for candidate in choice.candidates if candidate.algorithm == "star"), None)
    best = choice.candidates[0]
    if star is None:
        return f"A star has no {choice.operation}: nothing may pass through a middle."
    others = choice.world_size - 1
    if star.seconds <= best.seconds:
        return f"A star does not lose here: {others} other ranks are served by the middle in no more time."
    return (
        f"The star loses by {star.seconds / best.seconds:.1f}x: its middle serves {others} other ranks one after\n"
        "another over one link, while their own links are idle most of the time."
    )


def spell_seconds(value: float) -> str:
    """Formats a time with its unit: `12.3 us`, `4.56 ms`, `7.89 s`."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value < 1000 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"
