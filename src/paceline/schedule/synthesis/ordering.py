"""Puts the transfers of packed trees into an order, in which all hosts take them.

Messages of two ranks follow one another. So a message that must wait holds up those behind it, and the order decides
how much of their time the links are idle. There are two orders to choose from: by the number of hops before, and that
of a plan in which each link does one transfer at a time, and of those that could begin, the earliest comes next (list
scheduling; Graham 1966, "Bounds for certain multiprocessing anomalies").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.schedule.network import Network
from paceline.schedule.synthesis.trees import Hop, Trees, hop_costs


class Transfer(NamedTuple):
    """A hop of a part. It brings a sum or else a contribution, of which one is the last to the part."""

    part: int
    source: int
    target: int
    is_sum: bool
    is_last: bool


def by_begin(network: Network, parts: Sequence[Trees]) -> list[Transfer]:
    """Returns the transfers of all parts in the order in which they would begin."""
    costs = hop_costs(network, len(parts))
    free: dict[int, float] = {}
    # For each part the transfers that are left, in an order in which they can be done, and when each host has its data.
    left = [list(_in_turn(number, trees)) for number, trees in enumerate(parts)]
    ready: list[dict[int, float]] = [{} for _ in parts]
    arranged: list[Transfer] = []

    def begins_s(each: Transfer) -> float:
        hop = each.source, each.target
        return max(ready[each.part].get(each.source, 0.0), *(free.get(link, 0.0) for link, _ in costs[hop]))

    while any(left):
        candidates = [each for transfers in left for each in _possible(transfers)]
        chosen = min(candidates, key=lambda each: (begins_s(each), each))
        begin_s = begins_s(chosen)
        hop: Hop = chosen.source, chosen.target
        for link, seconds in costs[hop]:
            free[link] = begin_s + seconds
        arrives_s = begin_s + max(seconds for _, seconds in costs[hop])
        known = ready[chosen.part]
        known[chosen.target] = max(known.get(chosen.target, 0.0), arrives_s)
        left[chosen.part].remove(chosen)
        arranged.append(chosen)
    return _with_last(arranged, parts)


def by_level(parts: Sequence[Trees]) -> list[Transfer]:
    """Returns the transfers of all parts in the order of how many others they follow, one after another."""
    levels: dict[Transfer, int] = {}
    for number, trees in enumerate(parts):
        reached: dict[int, int] = {}
        for each in _in_turn(number, trees):
            levels[each] = reached.get(each.source, 0)
            reached[each.target] = max(reached.get(each.target, 0), levels[each] + 1)
    return _with_last(sorted(levels, key=lambda each: (levels[each], each)), parts)


def _in_turn(part: int, trees: Trees) -> Iterator[Transfer]:
    for is_sum, hops in ((False, trees.up), (True, trees.down)):
        yield from (Transfer(part, source, target, is_sum, False) for source, target in hops)


def _possible(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Yields those that wait for no other: no other brings their source what they pass on."""
    summing = any(not each.is_sum for each in transfers)
    awaiting = {each.target for each in transfers if each.is_sum != summing}
    return (each for each in transfers if each.is_sum != summing and each.source not in awaiting)


def _with_last(arranged: Sequence[Transfer], parts: Sequence[Trees]) -> list[Transfer]:
    """Marks the last contribution that reaches the root of each part."""
    last = {each.part: number for number, each in enumerate(arranged) if _completes(each, parts)}
    return [each._replace(is_last=last.get(each.part) == number) for number, each in enumerate(arranged)]


def _completes(each: Transfer, parts: Sequence[Trees]) -> bool:
    return not each.is_sum and each.target == parts[each.part].root
