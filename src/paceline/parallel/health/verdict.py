"""Which ranks differ from the others, judged by digests of what each of them holds, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.wording import and_more

_MOST_NAMED = 8  # ranks


@dataclass(frozen=True)
class Digests:
    """The digests of one part of the state on one rank.

    Attributes:
        shape: a digest of what there is; only ranks with the same are compared, and 0 says that there is nothing.
        total: a digest of the values.
    """

    shape: int
    total: int


@dataclass(frozen=True)
class Sides:
    """Ranks that hold different values: the larger side first, and all of equal size if nobody has the majority."""

    sides: tuple[tuple[int, ...], ...]

    @property
    def has_majority(self) -> bool:
        """Returns whether one side is larger than every other."""
        return len(self.sides[0]) > len(self.sides[1])

    @property
    def odd(self) -> tuple[int, ...]:
        """Returns the ranks that are not of the majority, all if there is none."""
        sides = self.sides[1:] if self.has_majority else self.sides
        return tuple(sorted(rank for side in sides for rank in side))

    def describe(self, ranks: Sequence[int]) -> str:
        """Returns who differs from whom; `ranks` are the numbers by which the ranks are named."""
        if self.has_majority:
            odd, majority = self.odd, self.sides[0]
            return f"{_named(odd, ranks)} {'differs' if len(odd) == 1 else 'differ'} from {_named(majority, ranks)}"
        if all(len(side) == 1 for side in self.sides):
            return f"{_named(self.odd, ranks)} differ, and no majority says which is right"
        sides = "; ".join(_named(side, ranks) for side in self.sides)
        return f"ranks differ, and no majority says which are right: {sides}"


def compare(everyones: Sequence[Digests]) -> Sides | None:
    """Returns which ranks differ in one part of the state, None if none do that can be compared.

    >>> compare([Digests(1, 7), Digests(1, 7), Digests(1, 8)]).describe([0, 1, 2])
    'rank 2 differs from ranks 0 and 1'
    >>> compare([Digests(1, 7), Digests(1, 8)]).describe([0, 1])
    'ranks 0 and 1 differ, and no majority says which is right'
    """
    by_shape: dict[int, dict[int, list[int]]] = {}
    for rank, each in enumerate(everyones):
        if each.shape:
            by_shape.setdefault(each.shape, {}).setdefault(each.total, []).append(rank)
    different = [values for values in by_shape.values() if len(values) > 1]
    if not different:
        return None
    largest = max(different, key=lambda values: sum(map(len, values.values())))
    return Sides(tuple(tuple(side) for side in sorted(largest.values(), key=lambda side: (-len(side), side))))


def differing_names(sides: Sides, everyones: Sequence[Mapping[str, int]]) -> list[str]:
    """Returns the names whose digests are not the same on all ranks of these sides, in their order."""
    members = [everyones[rank] for side in sides.sides for rank in side]
    return [name for name in members[0] if any(each.get(name) != members[0][name] for each in members[1:])]


@dataclass(frozen=True)
class Difference:
    """A part of the state that is not the same on all ranks.

    Attributes:
        part: what differs, such as "parameters".
        sides: which ranks differ, by their numbers in the group.
        names: what differs first, and so on, in the order of the module.
        count: how many names there are.
    """

    part: str
    sides: Sides
    names: tuple[str, ...]
    count: int

    def describe(self, ranks: Sequence[int]) -> str:
        """Returns who differs from whom and in what; `ranks` are the numbers by which the ranks are named."""
        return (
            f"{self.sides.describe(ranks)} in {len(self.names)} of {self.count} {self.part}, first in {self.names[0]}"
        )


def _named(numbers: Sequence[int], ranks: Sequence[int]) -> str:
    names = [ranks[number] for number in numbers]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"ranks {and_more(names, _MOST_NAMED)}"
    return f"ranks {', '.join(map(str, names[:-1]))} and {names[-1]}"
