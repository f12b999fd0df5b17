"""The ring: every rank sends to its right and receives from its left, all at the same time.

Each byte crosses each link a minimal number of times, so a ring is the best for long tensors; it takes a number of
messages that grows with the world. Reduce-scatter and all-gather are the bucket algorithms of Barnett et al. 1994
("Interprocessor collective communication library"); all-reduce is one after the other (Patarasuk and Yuan 2009).
From or to a root the ring is a chain, and long tensors flow along it as through a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedule.steps import (
    NOTHING,
    OWN_INPUT,
    OWN_OUTPUT,
    Buffer,
    Builder,
    Operation,
    Place,
    Plan,
    Slice,
    Step,
    combine,
    copy,
    receive,
    send,
    singles,
)

Chunk = Sequence[Slice]


def reduce_phase(
    ring: Sequence[int], me: int, own: Sequence[Chunk], into: Sequence[Chunk], *, final: bool = True
) -> list[Step]:
    """Reduce-scatter: chunk i of all members' `own` ends up reduced in member i's `into`. ring[me] is this rank."""
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
    """All-gather: chunk i, which member i holds, ends up with all members. ring[me] is this rank."""
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


def all_reduce(at: Place) -> Plan:
    """Reduce-scatter, then all-gather, in place."""
    ring = range(at.world_size)
    chunks = singles(Buffer.OUTPUT, ring)
    return at.world_size, reduce_phase(ring, at.rank, chunks, chunks) + gather_phase(ring, at.rank, chunks)


def reduce_scatter(at: Place) -> Plan:
    """Partial results travel in SCRATCH; the last reduction writes OUTPUT."""
    ring = range(at.world_size)
    if at.world_size == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    into = singles(Buffer.SCRATCH, ring)
    into[at.rank] = [OWN_OUTPUT]
    return at.world_size, reduce_phase(ring, at.rank, singles(Buffer.INPUT, ring), into)


def all_gather(at: Place) -> Plan:
    """Put the own block in its place, then pass blocks around."""
    ring = range(at.world_size)
    own = copy(Slice(Buffer.OUTPUT, at.rank), OWN_INPUT)
    return at.world_size, [own, *gather_phase(ring, at.rank, singles(Buffer.OUTPUT, ring))]


def broadcast(at: Place) -> Plan:
    """A chain from the root around the ring to the root's left."""
    n, tensor = at.world_size, OWN_OUTPUT
    steps: list[Step] = []
    if at.rank != at.root:
        steps.append(receive((at.rank - 1) % n, tensor))
    if (at.rank + 1) % n != at.root:
        steps.append(send((at.rank + 1) % n, tensor))
    return 1, steps


def reduce(at: Place) -> Plan:
    """A chain from the root's right around the ring to the root; each rank adds its own."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    if n == 1:
        return 1, []
    if at.rank == at.root:
        return 1, [combine(left, OWN_OUTPUT, OWN_OUTPUT, final=True)]
    if left == at.root:
        return 1, [send(right, OWN_INPUT)]
    partial = Slice(Buffer.SCRATCH, 0)
    return 1, [combine(left, partial, OWN_INPUT), send(right, partial)]


def gather(at: Place) -> Plan:
    """Every rank sends its own block right, towards the root, and then those that come from its left."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    behind = [(at.root - distance) % n for distance in range((at.root - at.rank) % n + 1, n)]
    if at.rank == at.root:
        own = copy(Slice(Buffer.OUTPUT, at.rank), OWN_INPUT)
        return n, [own, *(receive(left, Slice(Buffer.OUTPUT, block)) for block in behind)]
    steps = [send(right, OWN_INPUT)]
    for block in behind:
        relayed = Slice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, steps


def scatter(at: Place) -> Plan:
    """The root sends the blocks right, that of its left first; every rank passes on all but its own, the last."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    ahead = [(at.root + distance) % n for distance in range(n - 1, (at.rank - at.root) % n, -1)]
    if at.rank == at.root:
        own = copy(OWN_OUTPUT, Slice(Buffer.INPUT, at.rank))
        return n, [*(send(right, Slice(Buffer.INPUT, block)) for block in ahead), own]
    steps: list[Step] = []
    for block in ahead:
        relayed = Slice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, [*steps, receive(left, OWN_OUTPUT)]


def all_to_all(at: Place) -> Plan:
    """Pairwise exchange: in turn t send to the rank t to the right and receive from the one t to the left."""
    n = at.world_size
    steps = [copy(Slice(Buffer.OUTPUT, at.rank), Slice(Buffer.INPUT, at.rank))]
    for turn in range(1, n):
        target, source = (at.rank + turn) % n, (at.rank - turn) % n
        steps += [send(target, Slice(Buffer.INPUT, target)), receive(source, Slice(Buffer.OUTPUT, source))]
    return n, steps


def barrier(at: Place) -> Plan:
    """A token goes around twice from rank 0: after the first lap all have come, the second lap says so."""
    n, left, right = at.world_size, (at.rank - 1) % at.world_size, (at.rank + 1) % at.world_size
    if n == 1:
        return 0, []
    come, go = receive(left, NOTHING), send(right, NOTHING)
    if at.rank == 0:
        return 0, [go, come, go]
    return 0, [come, go, come] if right == 0 else [come, go, come, go]


OFFERS: dict[Operation, Builder] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
}
