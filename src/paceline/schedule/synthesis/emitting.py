"""Turns packed trees into the steps of each rank.

If all hosts have equally many ranks, the l-th ranks of all hosts run the trees on the l-th slice of the tensor, which
rings within the hosts have reduced and pass around afterwards, as in `hierarchical.py`. Otherwise the leaders do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from paceline.schedule import ring, tree
from paceline.schedule.hierarchical import find_home
from paceline.schedule.registry import SYNTHESISED
from paceline.schedule.steps import Buffer, Operation, Place, Schedule, Slice, Step, combine, receive, send
from paceline.schedule.synthesis.trees import Trees, heights


class _Transfer(NamedTuple):
    """A hop of a part: when it comes, compared with others, and whether it brings a sum or a contribution."""

    order: int
    first: int
    length: int
    source: int
    target: int
    is_sum: bool
    is_last: bool  # of the contributions to the part


def all_reduce(at: Place, parts: Sequence[Trees]) -> Schedule:
    """Returns a rank's schedule. The hosts of `at` are those that the trees join."""
    hosts, host, local, me = home = find_home(at)
    n_local, n_parts = len(local), len(parts)
    if home.is_even:
        slices = [[Slice(Buffer.OUTPUT, owner * n_parts, n_parts)] for owner in range(n_local)]
        steps = ring.reduce_phase(local, me, slices, slices, final=False)
        steps += _along(parts, home.rail, host, me * n_parts)
        steps += ring.gather_phase(local, me, slices)
        return Schedule(Operation.ALL_REDUCE, SYNTHESISED, at.rank, at.world_size, -1, n_local * n_parts, tuple(steps))
    tensor = Slice(Buffer.OUTPUT, 0, n_parts)
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += _along(parts, home.rail, host, 0)
    steps += tree.broadcast_phase(local, me, tensor)
    return Schedule(Operation.ALL_REDUCE, SYNTHESISED, at.rank, at.world_size, -1, n_parts, tuple(steps))


def _along(parts: Sequence[Trees], members: Sequence[int], host: int, first: int) -> list[Step]:
    """Returns the steps of members[host]. All members take the transfers in the same order, so none waits for ever."""
    steps: list[Step] = []
    for each in _transfers(parts):
        blocks = Slice(Buffer.OUTPUT, first + each.first, each.length)
        if each.source == host:
            steps.append(send(members[each.target], blocks))
        elif each.target == host and each.is_sum:
            steps.append(receive(members[each.source], blocks))
        elif each.target == host:
            steps.append(combine(members[each.source], blocks, blocks, each.is_last))
    return steps


def _transfers(parts: Sequence[Trees]) -> list[_Transfer]:
    found: list[_Transfer] = []
    first = 0
    for trees, equal in groupby(parts):
        length = len(list(equal))
        up, down = heights(trees.up), heights(trees.down)
        above = max(up.values(), default=-1) + 1
        into_root = [hop for hop in sorted(up, key=lambda hop: (up[hop], hop)) if hop[1] == trees.root]
        for source, target in trees.up:
            is_last = (source, target) == into_root[-1]
            found.append(_Transfer(up[source, target], first, length, source, target, False, is_last))
        for source, target in trees.down:
            order = above + down[source, target]
            found.append(_Transfer(order, first, length, source, target, True, False))
        first += length
    return sorted(found)
