"""All-reduces on rails: within each host first, then between hosts, where all ranks of a host exchange at once.

The l-th ranks of all hosts are the l-th rail, which owns the l-th slice of the tensor: rings within the hosts reduce
the slice, the rail exchanges it between hosts (`circulant.py`), and rings within the hosts pass the slices around. The
tensor is cut into segments: while one is under way between hosts, the next one is reduced within them. Each host's
rings move the blocks in the order in which its rails need them.

`LONG` is what `hierarchical` uses: a rank exchanges with one other host at a time, and the segments are many. `SHORT`
makes the algorithm `circulant`: it takes fewer rounds, in which a rank sends to several hosts at the same time, and
cuts less, for tensors whose messages' alphas count more than their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.schedule import circulant, ring, tree
from paceline.schedule.cost_model import Case, Cost, message_s
from paceline.schedule.cost_model import rounds as doublings
from paceline.schedule.home import Home, find_home
from paceline.schedule.steps import Buffer, Builder, Operation, Place, Plan, Slice, Step, rotated, runs


class Cut(NamedTuple):
    """How rails divide their work.

    Attributes:
        radix: into how many parts a round between hosts divides what a rank has.
        segments: into how many parts the tensor is cut where hosts have several ranks.
    """

    radix: int
    segments: int

    def segments_for(self, n_hosts: int, n_local: int) -> int:
        """Returns the number of segments on so many hosts of so many ranks."""
        return self.segments if n_hosts > 1 and n_local > 1 else 1


LONG = Cut(radix=2, segments=8)
SHORT = Cut(radix=12, segments=2)


def all_reduce(home: Home, cut: Cut) -> Plan:
    """Returns a rank's part of an all-reduce between hosts of equally many ranks."""
    hosts, host, local, me = home
    n_hosts, n_local = len(hosts), len(local)
    segments = range(cut.segments_for(n_hosts, n_local))

    def slices(segment: int, order: Sequence[int]) -> list[list[Slice]]:
        firsts = range(segment * n_local * n_hosts, (segment + 1) * n_local * n_hosts, n_hosts)
        return [runs(Buffer.OUTPUT, (first + block for block in order)) for first in firsts]

    mine = [range(first, first + n_hosts) for first in ((each * n_local + me) * n_hosts for each in segments)]
    needed, complete = circulant.in_order_of_need(n_hosts, host, cut.radix), rotated(range(n_hosts), host)
    steps: list[Step] = []
    for segment in segments:
        chunks = slices(segment, needed)
        steps += ring.reduce_phase(local, me, chunks, chunks, final=n_hosts == 1)
    for blocks in mine:
        steps += circulant.reduce_phase(home.rail, host, blocks, cut.radix)
    for blocks in mine:
        steps += circulant.gather_phase(home.rail, host, blocks, cut.radix)
    for segment in segments:
        steps += ring.gather_phase(local, me, slices(segment, complete))
    return len(segments) * n_local * n_hosts, steps


def _short_all_reduce(at: Place) -> Plan:
    """Rails with few rounds; hosts that are not equal leave the exchange to their leaders."""
    hosts, host, local, me = home = find_home(at)
    if home.is_even:
        return all_reduce(home, SHORT)
    tensor, blocks = Slice(Buffer.OUTPUT, 0, len(hosts)), range(len(hosts))
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += circulant.reduce_phase(home.rail, host, blocks, SHORT.radix)
        steps += circulant.gather_phase(home.rail, host, blocks, SHORT.radix)
    return len(hosts), steps + tree.broadcast_phase(local, me, tensor)


ALIKE = frozenset((Operation.ALL_REDUCE,))
"""As in `hierarchical.py`."""

OFFERS: dict[Operation, Builder] = {Operation.ALL_REDUCE: _short_all_reduce}


def cost(case: Case, cut: Cut) -> float:
    """Returns the seconds of an all-reduce between hosts of equally many ranks."""
    return _phase_s(case, cut, case.gamma) + _phase_s(case, cut, 0)


def _phase_s(case: Case, cut: Cut, gamma: float) -> float:
    """Returns the seconds of the rings within hosts and of the rails, two stages through which the segments pass."""
    segments = cut.segments_for(case.n_hosts, case.local)
    turns, slice_nbytes = case.local - 1, case.nbytes / case.local
    within = turns * segments * case.model.within_host.alpha_s + turns * slice_nbytes * (
        case.model.within_host.beta_s_per_byte + gamma
    )
    between = _between_s(case, cut.radix, segments, slice_nbytes, case.local, gamma)
    return (within + between) / segments + max(within, between) * (segments - 1) / segments


def _between_s(case: Case, radix: int, segments: int, nbytes: float, sharing: int, gamma: float) -> float:
    """Returns the seconds of a phase between hosts, in which `sharing` ranks of each host exchange `nbytes` each."""
    far, share = case.model.between_hosts, nbytes * (case.n_hosts - 1) / case.n_hosts
    waiting_s = circulant.waiting_s(case.n_hosts, radix, far, segments)
    return waiting_s + share * (sharing * far.beta_s_per_byte + gamma)


def _short_cost(case: Case) -> float:
    if len(set(case.host_sizes)) == 1:
        return cost(case, SHORT)
    up, down = (message_s(case.model.within_host, case.nbytes, gamma) for gamma in (case.gamma, 0))
    between = sum(_between_s(case, SHORT.radix, 1, case.nbytes, 1, gamma) for gamma in (case.gamma, 0))
    return doublings(case.local) * (up + down) + between


COSTS: dict[Operation, Cost] = {Operation.ALL_REDUCE: _short_cost}
