"""The ring, in which every rank sends to its right neighbor and receives from its left neighbor at the same time.

Each byte crosses each link the minimum number of times, so rings are the best choice for long tensors. The number of
messages, however, grows with the world size. Reduce-scatter and all-gather are the bucket algorithms of Barnett et al.
1994 ("Interprocessor collective communication library"); all-reduce is a reduce-scatter followed by an all-gather
(Patarasuk and Yuan 2009). In operations with a root, the ring is a chain along which long tensors are pipelined.

These schedules are used between hosts, and within a host if an algorithm is forced. Otherwise the ranks on one host
reduce directly in shared memory (native/host/reductions.cpp).
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
    """Returns the steps that sum chunk i of all members' `own` into member i's `into`. ring[me] is this rank."""
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
    """Returns the steps of an all-gather, in which member i sends chunk i to all members. ring[me] is this rank."""
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


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Performs a reduce-scatter, then an all-gather, both in place."""
    ring = range(topology.world_size)
    chunks = one_block_chunks(Buffer.OUTPUT, ring)
    return topology.world_size, reduce_phase(ring, topology.rank, chunks, chunks) + gather_phase(
        ring, topology.rank, chunks
    )


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Keeps partial results in SCRATCH; the last reduction writes to OUTPUT."""
    ring = range(topology.world_size)
    if topology.world_size == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    into = one_block_chunks(Buffer.SCRATCH, ring)
    into[topology.rank] = [OWN_OUTPUT]
    return topology.world_size, reduce_phase(ring, topology.rank, one_block_chunks(Buffer.INPUT, ring), into)


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Each rank copies its own block to OUTPUT, and then all blocks are passed around the ring."""
    ring = range(topology.world_size)
    own = copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT)
    return topology.world_size, [own, *gather_phase(ring, topology.rank, one_block_chunks(Buffer.OUTPUT, ring))]


def broadcast(topology: RankTopology) -> BlocksAndSteps:
    """Passes the tensor along a chain from the root around the ring to the root's left neighbor."""
    n, tensor = topology.world_size, OWN_OUTPUT
    steps: list[Step] = []
    if topology.rank != topology.root:
        steps.append(receive((topology.rank - 1) % n, tensor))
    if (topology.rank + 1) % n != topology.root:
        steps.append(send((topology.rank + 1) % n, tensor))
    return 1, steps


def reduce(topology: RankTopology) -> BlocksAndSteps:
    """Passes sums from the root's right neighbor around the ring to the root; each rank adds its own tensor."""
    n = topology.world_size
    left, right = (topology.rank - 1) % n, (topology.rank + 1) % n
    if n == 1:
        return 1, []
    if topology.rank == topology.root:
        return 1, [combine(left, OWN_OUTPUT, OWN_OUTPUT, final=True)]
    if left == topology.root:
        return 1, [send(right, OWN_INPUT)]
    partial = BufferSlice(Buffer.SCRATCH, 0)
    return 1, [combine(left, partial, OWN_INPUT), send(right, partial)]


def gather(topology: RankTopology) -> BlocksAndSteps:
    """Every rank sends its own block to the right, toward the root, and then forwards the blocks from the left."""
    n = topology.world_size
    left, right = (topology.rank - 1) % n, (topology.rank + 1) % n
    behind = [(topology.root - distance) % n for distance in range((topology.root - topology.rank) % n + 1, n)]
    if topology.rank == topology.root:
        own = copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT)
        return n, [own, *(receive(left, BufferSlice(Buffer.OUTPUT, block)) for block in behind)]
    steps = [send(right, OWN_INPUT)]
    for block in behind:
        relayed = BufferSlice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, steps


def scatter(topology: RankTopology) -> BlocksAndSteps:
    """The root sends the farthest rank's block first; every rank forwards all blocks except the last one, its own."""
    n = topology.world_size
    left, right = (topology.rank - 1) % n, (topology.rank + 1) % n
    ahead = [(topology.root + distance) % n for distance in range(n - 1, (topology.rank - topology.root) % n, -1)]
    if topology.rank == topology.root:
        own = copy(OWN_OUTPUT, BufferSlice(Buffer.INPUT, topology.rank))
        return n, [*(send(right, BufferSlice(Buffer.INPUT, block)) for block in ahead), own]
    steps: list[Step] = []
    for block in ahead:
        relayed = BufferSlice(Buffer.SCRATCH, block)
        steps += [receive(left, relayed), send(right, relayed)]
    return n, [*steps, receive(left, OWN_OUTPUT)]


def all_to_all(topology: RankTopology) -> BlocksAndSteps:
    """Exchanges blocks pairwise: in round t, rank r sends to rank r + t and receives from rank r - t."""
    n = topology.world_size
    steps = [copy(BufferSlice(Buffer.OUTPUT, topology.rank), BufferSlice(Buffer.INPUT, topology.rank))]
    for turn in range(1, n):
        target, source = (topology.rank + turn) % n, (topology.rank - turn) % n
        steps += [send(target, BufferSlice(Buffer.INPUT, target)), receive(source, BufferSlice(Buffer.OUTPUT, source))]
    return n, steps


def barrier(topology: RankTopology) -> BlocksAndSteps:
    """Rank 0 sends a token around the ring twice: first to collect the arrivals, and then to report them."""
    n = topology.world_size
    left, right = (topology.rank - 1) % n, (topology.rank + 1) % n
    if n == 1:
        return 0, []
    receive_token, send_token = receive(left, NOTHING), send(right, NOTHING)
    if topology.rank == 0:
        return 0, [send_token, receive_token, send_token]
    first_lap = [receive_token, send_token]
    return 0, [*first_lap, receive_token] if right == 0 else first_lap * 2


ALIKE = frozenset((Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL))
"""The operations in which equal hosts perform the same steps relative to their position."""

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
    """Returns the time, in seconds, for n - 1 rounds that each move an n-th of the bytes."""
    return (n - 1) * message_s(link, nbytes / n, gamma)


def _chain(case: Case, gamma: float = 0) -> float:
    """Returns the time, in seconds, for a piece to cross a chain of n - 1 links and for the other pieces to follow."""
    piece = min(case.nbytes, PIPE_NBYTES)
    first = (case.n - case.n_hosts) * message_s(case.model.within_host, piece, gamma) + (case.n_hosts - 1) * message_s(
        case.model.between_hosts, piece, gamma
    )
    return first + (case.nbytes - piece) * (case.slowest.beta_s_per_byte + gamma) if case.n > 1 else 0


def _pairwise(case: Case) -> float:
    """Returns the time, in seconds, for a pairwise exchange; in most rounds all ranks on a host send to other hosts."""
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
