"""Recursive halving and doubling, with log2(n) rounds like a tree and as few bytes as a ring.

An all-reduce consists of a reduce-scatter, in which partners exchange halves of their remaining data, and an
all-gather, which repeats the rounds in reverse: Rabenseifner 2004, "Optimization of Collective Reduction Operations".
If the world size is not a power of two, the first ranks are folded, as in that paper: in each of the first pairs, the
odd rank sends its data to the even rank and receives the result at the end. Broadcast is a scatter followed by an
all-gather (Barnett et al. 1994; Thakur, Rabenseifner, Gropp 2005); the barrier is the dissemination barrier (Hensgen,
Finkel, Manber 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.comm.schedule import tree
from paceline.comm.schedule.cost_model import PIPE_NBYTES, Case, Cost, doubling_rounds, message_s
from paceline.comm.schedule.steps import (
    NOTHING,
    OWN_INPUT,
    OWN_OUTPUT,
    BlocksAndSteps,
    Buffer,
    BufferSlice,
    Builder,
    Operation,
    RankTopology,
    Step,
    combine,
    copy,
    receive,
    rotated,
    send,
)


class _FoldedGroup(NamedTuple):
    """The ranks that remain after folding. `slot` is this rank's index in `active`, whose length is a power of two.

    `partner` is the other rank of a folded pair, or -1; `folded` is true on the idle rank of the pair.
    """

    active: list[int]
    slot: int
    partner: int
    folded: bool


def _fold(group: Sequence[int], me: int) -> _FoldedGroup:
    extra = len(group) - (1 << len(group).bit_length() - 1)
    active = [*group[: 2 * extra : 2], *group[2 * extra :]]
    if me < 2 * extra:
        return _FoldedGroup(active, me // 2, group[me ^ 1], folded=me % 2 == 1)
    return _FoldedGroup(active, me - extra, -1, folded=False)


def _even_edges(fold: _FoldedGroup) -> range:
    """Returns the edges for one block per slot; the blocks of slot i are range(edges[i], edges[i + 1])."""
    return range(len(fold.active) + 1)


def _rank_edges(fold: _FoldedGroup, world_size: int) -> list[int]:
    """Returns the edges for one block per rank; the slot of a folded pair has two blocks."""
    return [*fold.active, world_size]


def halving_phase(fold: _FoldedGroup, edges: Sequence[int], own: Buffer, into: Buffer) -> list[Step]:
    """Returns the steps of a reduce-scatter of all slots' `own`; slot i gets the sums of its blocks in `into`."""
    steps: list[Step] = []
    low, high = 0, len(fold.active)
    while (half := (high - low) // 2) > 0:
        middle = low + half
        kept, given = ((low, middle), (middle, high)) if fold.slot < middle else ((middle, high), (low, middle))
        partner = fold.active[fold.slot ^ half]
        steps.append(send(partner, _span(own, edges, *given)))
        steps.append(combine(partner, _span(into, edges, *kept), _span(own, edges, *kept), final=half == 1))
        own, (low, high) = into, kept
    return steps


def doubling_phase(fold: _FoldedGroup, edges: Sequence[int], buffer: Buffer) -> list[Step]:
    """Returns the steps of an all-gather, in which every slot's blocks are sent to all slots."""
    steps: list[Step] = []
    width = 1
    while width < len(fold.active):
        mine, theirs = fold.slot & -width, (fold.slot ^ width) & -width
        partner = fold.active[fold.slot ^ width]
        steps.append(send(partner, _span(buffer, edges, mine, mine + width)))
        steps.append(receive(partner, _span(buffer, edges, theirs, theirs + width)))
        width *= 2
    return steps


def _span(buffer: Buffer, edges: Sequence[int], low: int, high: int) -> BufferSlice:
    return BufferSlice(buffer, edges[low], edges[high] - edges[low])


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Folds, halves, doubles and unfolds, all in place."""
    fold = _fold(range(topology.world_size), topology.rank)
    edges = _even_edges(fold)
    tensor = _span(Buffer.OUTPUT, edges, 0, -1)
    if fold.folded:
        return tensor.length, [send(fold.partner, tensor), receive(fold.partner, tensor)]
    steps = halving_phase(fold, edges, Buffer.OUTPUT, Buffer.OUTPUT) + doubling_phase(fold, edges, Buffer.OUTPUT)
    if fold.partner >= 0:
        steps = [combine(fold.partner, tensor, tensor), *steps, send(fold.partner, tensor)]
    return tensor.length, steps


def reduce(topology: RankTopology) -> BlocksAndSteps:
    """Folds, halves, and gathers to the root in slot 0."""
    world = rotated(range(topology.world_size), topology.root)
    fold = _fold(world, world.index(topology.rank))
    edges = _even_edges(fold)
    own, into = (Buffer.OUTPUT, Buffer.OUTPUT) if topology.rank == topology.root else (Buffer.INPUT, Buffer.SCRATCH)
    tensor, partial = _span(own, edges, 0, -1), _span(into, edges, 0, -1)
    if fold.folded:
        return tensor.length, [send(fold.partner, tensor)]
    steps: list[Step] = []
    if fold.partner >= 0:
        steps, own = [combine(fold.partner, partial, tensor)], into
    steps += halving_phase(fold, edges, own, into)
    return tensor.length, steps + tree.gather_phase(fold.active, fold.slot, [[i] for i in edges[:-1]], into)


def broadcast(topology: RankTopology) -> BlocksAndSteps:
    """Scatters from the root in slot 0, then doubles and unfolds."""
    world = rotated(range(topology.world_size), topology.root)
    fold = _fold(world, world.index(topology.rank))
    edges = _even_edges(fold)
    tensor = _span(Buffer.OUTPUT, edges, 0, -1)
    if fold.folded:
        return tensor.length, [receive(fold.partner, tensor)]
    steps = tree.scatter_phase(fold.active, fold.slot, [[i] for i in edges[:-1]], Buffer.OUTPUT)
    steps += doubling_phase(fold, edges, Buffer.OUTPUT)
    return tensor.length, [*steps, send(fold.partner, tensor)] if fold.partner >= 0 else steps


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Folds, doubles and unfolds."""
    n = topology.world_size
    fold = _fold(range(n), topology.rank)
    everything = BufferSlice(Buffer.OUTPUT, 0, n)
    if fold.folded:
        return n, [send(fold.partner, OWN_INPUT), receive(fold.partner, everything)]
    own = copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT)
    steps = doubling_phase(fold, _rank_edges(fold, n), Buffer.OUTPUT)
    if fold.partner >= 0:
        taken = receive(fold.partner, BufferSlice(Buffer.OUTPUT, fold.partner))
        return n, [own, taken, *steps, send(fold.partner, everything)]
    return n, [own, *steps]


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Folds, halves, and sends each folded rank its block."""
    n = topology.world_size
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    fold = _fold(range(n), topology.rank)
    tensor, partial = BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n)
    if fold.folded:
        return n, [send(fold.partner, tensor), receive(fold.partner, OWN_OUTPUT)]
    own = copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, topology.rank))
    edges = _rank_edges(fold, n)
    if fold.partner < 0:
        return n, [*halving_phase(fold, edges, Buffer.INPUT, Buffer.SCRATCH), own]
    steps = [combine(fold.partner, partial, tensor), *halving_phase(fold, edges, Buffer.SCRATCH, Buffer.SCRATCH)]
    return n, [*steps, send(fold.partner, BufferSlice(Buffer.SCRATCH, fold.partner)), own]


def disseminate_phase(group: Sequence[int], me: int) -> list[Step]:
    """Returns the steps of a barrier; each round doubles the number of arrivals reported to each member."""
    n, steps, distance = len(group), list[Step](), 1
    while distance < n:
        steps += [send(group[(me + distance) % n], NOTHING), receive(group[me - distance], NOTHING)]
        distance *= 2
    return steps


def barrier(topology: RankTopology) -> BlocksAndSteps:
    """The dissemination barrier."""
    return 0, disseminate_phase(range(topology.world_size), topology.rank)


OFFERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.BARRIER: barrier,
}


_OVERLAP = 4 / 3
"""The factor by which overlap slows down rounds that exchange long halves.

The lower half of a message arrives first. Ranks that need this half begin their next round while other ranks are still
in the current one. The early ranks then take a part of the bandwidth on those ranks' links, and later leave their own
links idle. Simulations with 4 to 32 ranks yield factors of 1.32 to 1.4.
"""


def _halves(case: Case, gamma: float = 0, *, alone: bool = False) -> float:
    """Returns the time, in seconds, for rounds that move 1/2, 1/4, 1/8... of the bytes and, with `gamma`, reduce them.

    The ranks on a host share its link to other hosts unless only one of them is active (`alone`).
    """
    width = 1 << case.n.bit_length() - 1
    total, nbytes, distance = 0.0, case.nbytes / 2, width // 2
    while distance:
        link = case.link(distance if case.n == width else 2 * distance)
        sharing = case.local if link is case.model.between_hosts and not alone else 1
        overlap = _OVERLAP if gamma and width > 2 and nbytes > PIPE_NBYTES else 1
        total += link.alpha_s + nbytes * (overlap * sharing * link.beta_s_per_byte + gamma)
        nbytes, distance = nbytes / 2, distance // 2
    return total


def _fold_s(case: Case, nbytes: float, gamma: float = 0) -> float:
    """Returns the time, in seconds, that folded ranks need to send or receive their data; 0 if no rank is folded."""
    return message_s(case.link(1), nbytes, gamma) if case.n & (case.n - 1) else 0


COSTS: dict[Operation, Cost] = {
    Operation.ALL_REDUCE: lambda case: (
        _halves(case, case.gamma) + _halves(case) + _fold_s(case, case.nbytes, case.gamma) + _fold_s(case, case.nbytes)
    ),
    Operation.REDUCE_SCATTER: lambda case: (
        _halves(case, case.gamma) + _fold_s(case, case.nbytes, case.gamma) + _fold_s(case, case.block)
    ),
    Operation.ALL_GATHER: lambda case: _halves(case) + _fold_s(case, case.block) + _fold_s(case, case.nbytes),
    Operation.REDUCE: lambda case: (
        _halves(case, case.gamma) + _halves(case, alone=True) + _fold_s(case, case.nbytes, case.gamma)
    ),
    Operation.BROADCAST: lambda case: _halves(case, alone=True) + _halves(case) + _fold_s(case, case.nbytes),
    Operation.BARRIER: lambda case: doubling_rounds(case.n) * case.slowest.alpha_s,
}
