"""Reduce-scatter and all-gather on a circulant graph: few rounds as in a tree, few bytes as in a ring, for any number.

A member first holds contributions to the blocks of all n members. In a round it keeps those of itself and the members
that follow up to a distance, and sends the rest, each part straight to a member at whose place it begins. So with parts
of half (`radix` 2), what is left halves in each round, as in Träff 2024, "Optimal, non-pipelined reduce-scatter and
allreduce algorithms"; more parts save rounds where messages take long. No byte is sent more often than in a ring. Every
member does the same relative to its own place.

All-reduces on rails: within each host first, then between hosts, where all ranks of a host exchange at once.

The l-th ranks of all hosts are the l-th rail, which owns the l-th slice of the tensor: rings within the hosts reduce
the slice, the rail exchanges it between hosts (`circulant.py`), and rings within the hosts pass the slices around. The
tensor is cut into segments: while one is under way between hosts, the next one is reduced within them. Each host's
rings move the blocks in the order in which its rails need them.

`LONG` is what `hierarchical` uses: a rank exchanges with one other host at a time, and the segments are many. `SHORT`
makes the algorithm `circulant`: it takes fewer rounds, in which a rank sends to several hosts at the same time, and
cuts less, for tensors whose messages' alphas count more than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.comm.schedule import ring, tree
from paceline.comm.schedule.cost_model import Case, Cost, LinkCost, message_s
from paceline.comm.schedule.cost_model import doubling_rounds as doublings
from paceline.comm.schedule.steps import (
    BlocksAndSteps,
    Buffer,
    BufferSlice,
    Builder,
    HostPosition,
    Operation,
    RankTopology,
    Step,
    combine,
    contiguous_slices,
    find_host_position,
    receive,
    rotated,
    send,
)


class CirculantRound(NamedTuple):
    """What is reduced to the blocks at distances below `width` from those below `reach`, in parts of `width`."""

    width: int
    reach: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The parts that are sent, as distances and numbers of blocks."""
        return [(at, min(self.width, self.reach - at)) for at in range(self.width, self.reach, self.width)]


def circulant_rounds(n: int, radix: int) -> list[CirculantRound]:
    """Returns the rounds of a reduce-scatter among n members; an all-gather has them in reverse.

    They are as few as parts of a `radix`-th allow, and have no more parts than so few rounds need.
    """
    found = _rounds_of_radix(n, radix)
    while radix > 2 and len(smaller := _rounds_of_radix(n, radix - 1)) == len(found):
        found, radix = smaller, radix - 1
    return found


def _rounds_of_radix(n: int, radix: int) -> list[CirculantRound]:
    found = []
    while n > 1:
        width = -(-n // radix)
        found.append(CirculantRound(width, n))
        n = width
    return found


def send_order(n: int, me: int, radix: int) -> list[int]:
    """Returns the blocks in the order in which member `me` sends them in a reduce-scatter, its own last."""
    first = circulant_rounds(n, radix)[0].width if n > 1 else 0
    return [(me + first + at) % n for at in range(n)]


def reduce_phase(
    members: Sequence[int], me: int, blocks: Sequence[int], radix: int, *, final: bool = True
) -> list[Step]:
    """Returns a reduce-scatter of OUTPUT in place, after which member i has the sums of blocks[i].

    `members[me]` is this rank; there are as many blocks as members.
    """
    n, steps = len(members), list[Step]()
    for each in circulant_rounds(n, radix):
        for at, count in each.parts:
            steps += [send(members[(me + at) % n], src) for src in _slices_around(blocks, me + at, count)]
        for at, count in each.parts:
            complete = final and each.width == 1 and at == each.reach - 1
            source = members[(me - at) % n]
            steps += [combine(source, dst, dst, complete) for dst in _slices_around(blocks, me, count)]
    return steps


def gather_phase(members: Sequence[int], me: int, blocks: Sequence[int], radix: int) -> list[Step]:
    """Returns an all-gather of OUTPUT: blocks[i], which member i holds, ends up with all members."""
    n, steps = len(members), list[Step]()
    for each in reversed(circulant_rounds(n, radix)):
        for at, count in each.parts:
            steps += [send(members[(me - at) % n], src) for src in _slices_around(blocks, me, count)]
        for at, count in each.parts:
            steps += [receive(members[(me + at) % n], dst) for dst in _slices_around(blocks, me + at, count)]
    return steps


def _slices_around(blocks: Sequence[int], first: int, count: int) -> list[BufferSlice]:
    return contiguous_slices(Buffer.OUTPUT, _blocks_around(blocks, first, count))


def _blocks_around(blocks: Sequence[int], first: int, count: int) -> Iterator[int]:
    return (blocks[(first + at) % len(blocks)] for at in range(count))


def phase_latency_s(n: int, radix: int, link: LinkCost, calls: int = 1) -> float:
    """Returns the seconds that messages wait in as many phases of n members as `calls` says, one after another.

    The messages of a round are under way together, while each keeps its rank busy for a part of its alpha.
    """
    under_way_s = link.alpha_s - link.busy_s
    return sum(under_way_s + calls * len(each.parts) * link.busy_s for each in circulant_rounds(n, radix))


class RailParameters(NamedTuple):
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


LONG = RailParameters(radix=2, segments=8)
SHORT = RailParameters(radix=12, segments=2)


def all_reduce(home: HostPosition, cut: RailParameters) -> BlocksAndSteps:
    """Returns a rank's part of an all-reduce between hosts of equally many ranks."""
    hosts, host, local, me = home
    n_hosts, n_local = len(hosts), len(local)
    segments = range(cut.segments_for(n_hosts, n_local))

    def slices(segment: int, order: Sequence[int]) -> list[list[BufferSlice]]:
        firsts = range(segment * n_local * n_hosts, (segment + 1) * n_local * n_hosts, n_hosts)
        return [contiguous_slices(Buffer.OUTPUT, (first + block for block in order)) for first in firsts]

    mine = [range(first, first + n_hosts) for first in ((each * n_local + me) * n_hosts for each in segments)]
    needed, complete = send_order(n_hosts, host, cut.radix), rotated(range(n_hosts), host)
    steps: list[Step] = []
    for segment in segments:
        chunks = slices(segment, needed)
        steps += ring.reduce_phase(local, me, chunks, chunks, final=n_hosts == 1)
    for blocks in mine:
        steps += reduce_phase(home.rail, host, blocks, cut.radix)
    for blocks in mine:
        steps += gather_phase(home.rail, host, blocks, cut.radix)
    for segment in segments:
        steps += ring.gather_phase(local, me, slices(segment, complete))
    return len(segments) * n_local * n_hosts, steps


def _short_all_reduce(at: RankTopology) -> BlocksAndSteps:
    """Rails with few rounds; hosts that are not equal leave the exchange to their leaders."""
    hosts, host, local, me = home = find_host_position(at)
    if home.is_even:
        return all_reduce(home, SHORT)
    tensor, blocks = BufferSlice(Buffer.OUTPUT, 0, len(hosts)), range(len(hosts))
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += reduce_phase(home.rail, host, blocks, SHORT.radix)
        steps += gather_phase(home.rail, host, blocks, SHORT.radix)
    return len(hosts), steps + tree.broadcast_phase(local, me, tensor)


ALIKE = frozenset((Operation.ALL_REDUCE,))
"""As in `hierarchical.py`."""

OFFERS: dict[Operation, Builder] = {Operation.ALL_REDUCE: _short_all_reduce}


def cost(case: Case, cut: RailParameters) -> float:
    """Returns the seconds of an all-reduce between hosts of equally many ranks."""
    return _phase_s(case, cut, case.gamma) + _phase_s(case, cut, 0)


def _phase_s(case: Case, cut: RailParameters, gamma: float) -> float:
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
    waiting_s = phase_latency_s(case.n_hosts, radix, far, segments)
    return waiting_s + share * (sharing * far.beta_s_per_byte + gamma)


def _short_cost(case: Case) -> float:
    if len(set(case.host_sizes)) == 1:
        return cost(case, SHORT)
    up, down = (message_s(case.model.within_host, case.nbytes, gamma) for gamma in (case.gamma, 0))
    between = sum(_between_s(case, SHORT.radix, 1, case.nbytes, 1, gamma) for gamma in (case.gamma, 0))
    return doublings(case.local) * (up + down) + between


COSTS: dict[Operation, Cost] = {Operation.ALL_REDUCE: _short_cost}
