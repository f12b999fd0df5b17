"""The ring: every rank sends to its right and receives from its left, all at the same time.

Each byte crosses each link a minimal number of times, so a ring is best for long tensors; the number of its messages
grows with the world. Reduce-scatter and all-gather are the bucket algorithms of Barnett et al. 1994 ("Interprocessor
collective communication library"); all-reduce is a reduce-scatter followed by an all-gather (Patarasuk and Yuan 2009).
From or to a root the ring is a chain, and long tensors flow along it as through a pipe.

These schedules run between hosts, or where an algorithm is forced; the ranks of one host normally reduce directly in
shared memory (native/host/reducing.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule.cost_model import PIPE_NBYTES, Case, Cost, LinkCost, message_s
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
    one_block_chunks,
    receive,
    send,
)

Chunk = Sequence[BufferSlice]


def reduce_phase(
    ring: Sequence[int], me: int, own: Sequence[Chunk], into: Sequence[Chunk], *, final: bool = True
) -> list[Step]:
    """Returns a reduce-scatter: chunk i of all `own` ends up reduced in member i's `into`; ring[me] is this rank."""
    n = len(ring)
    left, right = ring[me - 1], ring[(me + 1) % n]
    steps: list[Step] = []
    leaving = (me - 1) % n
    for turn in range(n - 1):
        coming = leaving - 1 if leaving else n - 1
        complete = final and turn == n - 2
        steps += [send(right, src) for src in (into if turn else own)[leaving]]
        steps += [combine(left, dst, src, complete) for dst, src in zip(into[coming], own[coming], strict=True)]
        leaving = coming
    return steps


def gather_phase(ring: Sequence[int], me: int, chunks: Sequence[Chunk]) -> list[Step]:
    """Returns an all-gather: chunk i, which member i holds, ends up with all members. ring[me] is this rank."""
    n = len(ring)
    left, right = ring[me - 1], ring[(me + 1) % n]
    steps: list[Step] = []
    leaving = me
    for _ in range(n - 1):
        coming = leaving - 1 if leaving else n - 1
        steps += [send(right, src) for src in chunks[leaving]]
        steps += [receive(left, dst) for dst in chunks[coming]]
        leaving = coming
    return steps


def all_reduce(at: RankTopology) -> BlocksAndSteps:
    """A reduce-scatter, then an all-gather, both in place."""
    ring = range(at.world_size)
    chunks = one_block_chunks(Buffer.OUTPUT, ring)
    return at.world_size, reduce_phase(ring, at.rank, chunks, chunks) + gather_phase(ring, at.rank, chunks)


def reduce_scatter(at: RankTopology) -> BlocksAndSteps:
    """Partial results travel in SCRATCH; the last reduction writes OUTPUT."""
    ring = range(at.world_size)
    if at.world_size == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    into = one_block_chunks(Buffer.SCRATCH, ring)
    into[at.rank] = [OWN_OUTPUT]
    return at.world_size, reduce_phase(ring, at.rank, one_block_chunks(Buffer.INPUT, ring), into)


def all_gather(at: RankTopology) -> BlocksAndSteps:
    """Each rank puts its own block in its place, then the blocks are passed around."""
    ring = range(at.world_size)
    own = copy(BufferSlice(Buffer.OUTPUT, at.rank), OWN_INPUT)
    return at.world_size, [own, *gather_phase(ring, at.rank, one_block_chunks(Buffer.OUTPUT, ring))]


def broadcast(at: RankTopology) -> BlocksAndSteps:
    """A chain from the root around the ring to the root's left."""
    n, tensor = at.world_size, OWN_OUTPUT
    steps: list[Step] = []
    if at.rank != at.root:
        steps.append(receive((at.rank - 1) % n, tensor))
    if (at.rank + 1) % n != at.root:
        steps.append(send((at.rank + 1) % n, tensor))
    return 1, steps


def reduce(at: RankTopology) -> BlocksAndSteps:
    """A chain from the root's right around the ring to the root; each rank adds its own tensor."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    if n == 1:
        return 1, []
    if at.rank == at.root:
        return 1, [combine(left, OWN_OUTPUT, OWN_OUTPUT, final=True)]
    if left == at.root:
        return 1, [send(right, OWN_INPUT)]
    partial = BufferSlice(Buffer.SCRATCH, 0)
    return 1, [combine(left, partial, OWN_INPUT), send(right, partial)]


def gather(at: RankTopology) -> BlocksAndSteps:
    """Every rank sends its own block to its right, towards the root, and then those that come from its left."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    behind = [(at.root - distance) % n for distance in range((at.root - at.rank) % n + 1, n)]
    if at.rank == at.root:
        own = copy(BufferSlice(Buffer.OUTPUT, at.rank), OWN_INPUT)
        return n, [own, *(receive(left, BufferSlice(Buffer.OUTPUT, block)) for block in behind)]
    steps = [send(right, OWN_INPUT)]
    for block in behind:
        relayed = BufferSlice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, steps


def scatter(at: RankTopology) -> BlocksAndSteps:
    """The root sends the farthest rank's block first; every rank passes on all but the last, which is its own."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    ahead = [(at.root + distance) % n for distance in range(n - 1, (at.rank - at.root) % n, -1)]
    if at.rank == at.root:
        own = copy(OWN_OUTPUT, BufferSlice(Buffer.INPUT, at.rank))
        return n, [*(send(right, BufferSlice(Buffer.INPUT, block)) for block in ahead), own]
    steps: list[Step] = []
    for block in ahead:
        relayed = BufferSlice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, [*steps, receive(left, OWN_OUTPUT)]


def all_to_all(at: RankTopology) -> BlocksAndSteps:
    """A pairwise exchange: in turn t a rank sends t places to its right and receives from t places to its left."""
    n = at.world_size
    steps = [copy(BufferSlice(Buffer.OUTPUT, at.rank), BufferSlice(Buffer.INPUT, at.rank))]
    for turn in range(1, n):
        target, source = (at.rank + turn) % n, (at.rank - turn) % n
        steps += [send(target, BufferSlice(Buffer.INPUT, target)), receive(source, BufferSlice(Buffer.OUTPUT, source))]
    return n, steps


def barrier(at: RankTopology) -> BlocksAndSteps:
    """A token goes around twice from rank 0: after the first lap all ranks have come, and the second lap reports it."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    if n == 1:
        return 0, []
    come, go = receive(left, NOTHING), send(right, NOTHING)
    if at.rank == 0:
        return 0, [go, come, go]
    return 0, [come, go, come] if right == 0 else [come, go, come, go]


ALIKE = frozenset((Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL))
"""The operations in which, on equal hosts, every host's ranks do what the first one's do, relative to their host."""

OFFERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.GATHER: gather,
    Operation.SCATTER: scatter,
    Operation.ALL_TO_ALL: all_to_all,
    Operation.BARRIER: barrier,
}


def _ring_turns(link: LinkCost, n: int, nbytes: float, gamma: float = 0) -> float:
    """Returns the seconds of n - 1 turns that move an n-th of the bytes each."""
    return (n - 1) * message_s(link, nbytes / n, gamma)


def _chain(case: Case, gamma: float = 0) -> float:
    """Returns the seconds of a pipe of n - 1 links: a first piece crosses all, the rest follows at the slowest pace."""
    piece = min(case.nbytes, PIPE_NBYTES)
    first = (case.n - case.n_hosts) * message_s(case.model.within_host, piece, gamma) + (case.n_hosts - 1) * message_s(
        case.model.between_hosts, piece, gamma
    )
    return first + (case.nbytes - piece) * (case.slowest.beta_s_per_byte + gamma) if case.n > 1 else 0


def _pairwise(case: Case) -> float:
    """Returns the seconds of a pairwise exchange. In most turns all ranks of a host send to other hosts at once."""
    crossing = case.n - case.local
    per_block = case.block * case.local * case.model.between_hosts.beta_s_per_byte
    return (case.local - 1) * message_s(case.model.within_host, case.block) + crossing * (
        case.model.between_hosts.alpha_s + per_block
    )


COSTS: dict[Operation, Cost] = {
    Operation.ALL_REDUCE: lambda case: (
        _ring_turns(case.slowest, case.n, case.nbytes, case.gamma) + _ring_turns(case.slowest, case.n, case.nbytes)
    ),
    Operation.REDUCE_SCATTER: lambda case: _ring_turns(case.slowest, case.n, case.nbytes, case.gamma),
    Operation.ALL_GATHER: lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    Operation.GATHER: lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    Operation.SCATTER: lambda case: _ring_turns(case.slowest, case.n, case.nbytes),
    Operation.BROADCAST: _chain,
    Operation.REDUCE: lambda case: _chain(case, case.gamma),
    Operation.ALL_TO_ALL: _pairwise,
    Operation.BARRIER: lambda case: (2 * case.n - 1) * case.slowest.alpha_s if case.n > 1 else 0,
}
