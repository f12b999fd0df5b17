"""Collectives on rails and on the circulant graph, which requires as few rounds as a tree and as few bytes as a ring.

The number of members is arbitrary. At the start of a reduce-scatter, a member holds contributions to the blocks of all
n members. In each round it keeps the contributions to its own block and to the blocks of the next members up to a
certain distance. It divides the rest into parts, and sends each part to the member that owns the part's first block.
With `radix` 2, the remaining data is halved in each round, as in Träff 2024, "Optimal, non-pipelined reduce-scatter and
allreduce algorithms"; a division into more parts saves rounds, which helps on links with a high latency. No byte is
sent more often than in a ring. All members perform the same steps relative to their own position.

In an all-reduce on rails, the l-th ranks on all hosts form the l-th rail, which owns the l-th slice of the tensor.
Rings within the hosts reduce the slice, the rail exchanges it between hosts on the circulant graph, and rings within
the hosts distribute the slices. The tensor is divided into segments, so that one segment is exchanged between hosts
while the next segment is reduced within the hosts. The rings within a host move the blocks in the order in which the
rails need them.

`hierarchical.py` uses the parameters `LONG`: each rank exchanges data with one other host at a time, in many segments.
The algorithm `circulant` uses `SHORT`, for tensors whose transfer is dominated by latency: there are fewer segments and
fewer rounds, and a rank sends to several hosts at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.comm.schedule import ring, tree
from paceline.comm.schedule.cost_model import Case, Cost, LinkCost, doubling_rounds, message_s
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
    """A round that starts with the blocks at distances below `reach` and ends with those at distances below `width`."""

    width: int
    reach: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The distance and the number of blocks of each part that is sent."""
        distances = range(self.width, self.reach, self.width)
        return [(distance, min(self.width, self.reach - distance)) for distance in distances]


def circulant_rounds(n: int, radix: int) -> list[CirculantRound]:
    """Returns the rounds of a reduce-scatter among n members; an all-gather runs them in reverse.

    The number of rounds is the minimum for `radix` parts per round, and the number of parts is the minimum for that
    number of rounds.
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
    """Returns the blocks, beginning with those that member `me` sends in the first round."""
    first = circulant_rounds(n, radix)[0].width if n > 1 else 0
    return [(me + first + distance) % n for distance in range(n)]


def reduce_phase(
    members: Sequence[int], me: int, blocks: Sequence[int], radix: int, *, final: bool = True
) -> list[Step]:
    """Returns the steps of an in-place reduce-scatter on OUTPUT, after which member i has the sums of blocks[i].

    `members[me]` is this rank; the number of blocks equals the number of members.
    """
    n, steps = len(members), list[Step]()
    for turn in circulant_rounds(n, radix):
        for distance, count in turn.parts:
            target = members[(me + distance) % n]
            steps += [send(target, src) for src in _slices_around(blocks, me + distance, count)]
        for distance, count in turn.parts:
            complete = final and turn.width == 1 and distance == turn.reach - 1
            source = members[(me - distance) % n]
            steps += [combine(source, dst, dst, complete) for dst in _slices_around(blocks, me, count)]
    return steps


def gather_phase(members: Sequence[int], me: int, blocks: Sequence[int], radix: int) -> list[Step]:
    """Returns the steps of an all-gather on OUTPUT, in which member i sends blocks[i] to all members."""
    n, steps = len(members), list[Step]()
    for turn in reversed(circulant_rounds(n, radix)):
        for distance, count in turn.parts:
            steps += [send(members[(me - distance) % n], src) for src in _slices_around(blocks, me, count)]
        for distance, count in turn.parts:
            source = members[(me + distance) % n]
            steps += [receive(source, dst) for dst in _slices_around(blocks, me + distance, count)]
    return steps


def _slices_around(blocks: Sequence[int], first: int, count: int) -> list[BufferSlice]:
    return contiguous_slices(Buffer.OUTPUT, (blocks[index % len(blocks)] for index in range(first, first + count)))


def phase_latency_s(n: int, radix: int, link: LinkCost, calls: int = 1) -> float:
    """Returns the total latency, in seconds, of `calls` sequential phases among n members.

    The messages in a round are in flight at the same time, but each message occupies its rank for a part of the
    message's alpha.
    """
    flight_s = link.alpha_s - link.busy_s
    return sum(flight_s + calls * len(turn.parts) * link.busy_s for turn in circulant_rounds(n, radix))


class RailParameters(NamedTuple):
    """The division of work on rails.

    Attributes:
        radix: the number of parts into which each round between hosts divides a rank's data.
        segments: the number of segments into which the tensor is divided if hosts have several ranks.
    """

    radix: int
    segments: int

    def segments_for(self, n_hosts: int, n_local: int) -> int:
        """Returns the number of segments for `n_hosts` hosts with `n_local` ranks each."""
        return self.segments if n_hosts > 1 and n_local > 1 else 1


LONG = RailParameters(radix=2, segments=8)
SHORT = RailParameters(radix=12, segments=2)


def all_reduce(home: HostPosition, cut: RailParameters) -> BlocksAndSteps:
    """Returns a rank's steps in an all-reduce between hosts with equal numbers of ranks."""
    hosts, host, local, me = home
    n_hosts, n_local = len(hosts), len(local)
    segments = range(cut.segments_for(n_hosts, n_local))

    def slices(segment: int, order: Sequence[int]) -> list[list[BufferSlice]]:
        firsts = range(segment * n_local * n_hosts, (segment + 1) * n_local * n_hosts, n_hosts)
        return [contiguous_slices(Buffer.OUTPUT, (first + block for block in order)) for first in firsts]

    own = [range(first, first + n_hosts) for first in ((segment * n_local + me) * n_hosts for segment in segments)]
    needed, complete = send_order(n_hosts, host, cut.radix), rotated(range(n_hosts), host)
    steps: list[Step] = []
    for segment in segments:
        chunks = slices(segment, needed)
        steps += ring.reduce_phase(local, me, chunks, chunks, final=n_hosts == 1)
    for blocks in own:
        steps += reduce_phase(home.rail, host, blocks, cut.radix)
    for blocks in own:
        steps += gather_phase(home.rail, host, blocks, cut.radix)
    for segment in segments:
        steps += ring.gather_phase(local, me, slices(segment, complete))
    return len(segments) * n_local * n_hosts, steps


def _short_all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Returns the steps of an all-reduce in few rounds: on rails or, with uneven hosts, between leaders."""
    hosts, host, local, me = home = find_host_position(topology)
    if home.is_even:
        return all_reduce(home, SHORT)
    tensor, blocks = BufferSlice(Buffer.OUTPUT, 0, len(hosts)), range(len(hosts))
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += reduce_phase(home.rail, host, blocks, SHORT.radix)
        steps += gather_phase(home.rail, host, blocks, SHORT.radix)
    return len(hosts), steps + tree.broadcast_phase(local, me, tensor)


ALIKE = frozenset((Operation.ALL_REDUCE,))
"""See `hierarchical.ALIKE`."""

OFFERS: dict[Operation, Builder] = {Operation.ALL_REDUCE: _short_all_reduce}


def cost(case: Case, cut: RailParameters) -> float:
    """Returns the duration, in seconds, of an all-reduce between hosts with equal numbers of ranks."""
    return _phase_s(case, cut, case.gamma) + _phase_s(case, cut, 0)


def _phase_s(case: Case, cut: RailParameters, gamma: float) -> float:
    """Returns the duration, in seconds, of a two-stage pipeline of segments: rings within hosts, and rails."""
    segments = cut.segments_for(case.n_hosts, case.local)
    turns, slice_nbytes = case.local - 1, case.nbytes / case.local
    within = turns * segments * case.model.within_host.alpha_s + turns * slice_nbytes * (
        case.model.within_host.beta_s_per_byte + gamma
    )
    between = _between_s(case, cut.radix, segments, slice_nbytes, case.local, gamma)
    return (within + between) / segments + max(within, between) * (segments - 1) / segments


def _between_s(case: Case, radix: int, segments: int, nbytes: float, sharing: int, gamma: float) -> float:
    """Returns the duration in seconds of a phase in which `sharing` ranks on each host exchange `nbytes` bytes each."""
    far, share = case.model.between_hosts, nbytes * (case.n_hosts - 1) / case.n_hosts
    waiting_s = phase_latency_s(case.n_hosts, radix, far, segments)
    return waiting_s + share * (sharing * far.beta_s_per_byte + gamma)


def _short_cost(case: Case) -> float:
    if case.is_even:
        return cost(case, SHORT)
    up, down = (message_s(case.model.within_host, case.nbytes, gamma) for gamma in (case.gamma, 0))
    between = sum(_between_s(case, SHORT.radix, 1, case.nbytes, 1, gamma) for gamma in (case.gamma, 0))
    return doubling_rounds(case.local) * (up + down) + between


COSTS: dict[Operation, Cost] = {Operation.ALL_REDUCE: _short_cost}
