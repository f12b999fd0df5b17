"""Turns the transfers of packed trees into the steps of each rank.

If all hosts have equally many ranks, the l-th ranks of all hosts run the trees on the l-th slice of the tensor, which
rings within the hosts have reduced and pass around afterwards, as in `hierarchical.py`. Otherwise the leaders do.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedule import ring, tree
from paceline.schedule.home import find_home
from paceline.schedule.registry import SYNTHESISED
from paceline.schedule.steps import Buffer, Operation, Place, Schedule, Slice, Step, combine, receive, send
from paceline.schedule.synthesis.ordering import Transfer


def all_reduce(at: Place, transfers: Sequence[Transfer]) -> Schedule:
    """Returns a rank's schedule. The hosts of `at` are those that the transfers join."""
    _, host, local, me = home = find_home(at)
    n_local, n_parts = len(local), 1 + max(each.part for each in transfers)
    if home.is_even:
        slices = [[Slice(Buffer.OUTPUT, owner * n_parts, n_parts)] for owner in range(n_local)]
        steps = ring.reduce_phase(local, me, slices, slices, final=False)
        steps += _along(transfers, home.rail, host, me * n_parts)
        steps += ring.gather_phase(local, me, slices)
        return Schedule(Operation.ALL_REDUCE, SYNTHESISED, at.rank, at.world_size, -1, n_local * n_parts, tuple(steps))
    tensor = Slice(Buffer.OUTPUT, 0, n_parts)
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += _along(transfers, home.rail, host, 0)
    steps += tree.broadcast_phase(local, me, tensor)
    return Schedule(Operation.ALL_REDUCE, SYNTHESISED, at.rank, at.world_size, -1, n_parts, tuple(steps))


def _along(transfers: Sequence[Transfer], members: Sequence[int], host: int, first: int) -> list[Step]:
    """Returns the steps of members[host]. All members take the transfers in the same order, so none waits for ever."""
    steps: list[Step] = []
    for each in transfers:
        block = Slice(Buffer.OUTPUT, first + each.part)
        if each.source == host:
            steps.append(send(members[each.target], block))
        elif each.target == host and each.is_sum:
            steps.append(receive(members[each.source], block))
        elif each.target == host:
            steps.append(combine(members[each.source], block, block, each.is_last))
    return steps
