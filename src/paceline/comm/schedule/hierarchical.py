"""Hierarchical: ranks exchange data within each host first, then between hosts, since links between hosts are slower.

If all hosts have equally many ranks, the l-th ranks of all hosts form the l-th rail, which owns the l-th slice of the
tensor: rings within the hosts reduce the slice, the rail exchanges it between hosts, and rings within the hosts
pass the slices around, so that all ranks drive the network at once (as in Horovod's and NCCL's hierarchical all-reduce;
Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"). Otherwise, and for operations
with a root, each host's first rank is its leader and speaks for it; on the root's host the root is the leader.

`rails.py` has the all-reduce on rails.

The reductions of native/host/reducing.cpp as schedules, which can be proved and timed without such a machine.

They are not among the algorithms that a call can choose: within a host, the core does the same directly in shared
memory, without messages. Each rank of a block of ranks, which is a part of the machine, reduces one slice of the tensor
over its block; the ranks with the same place in all blocks exchange their slices and reduce them; and each block passes
the results around. With one block that is what the core does where memory is equally near to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule import circulant, halving_doubling, ring, tree
from paceline.comm.schedule.cost_model import Case, Cost, doubling_rounds, message_s
from paceline.comm.schedule.steps import (
    OWN_INPUT,
    OWN_OUTPUT,
    BlocksAndSteps,
    Buffer,
    BufferSlice,
    Builder,
    HostPosition,
    Operation,
    RankTopology,
    Schedule,
    Step,
    combine,
    contiguous_slices,
    copy,
    find_host_position,
    one_block_chunks,
    receive,
    send,
)


def reduce_in_blocks(rank: int, world_size: int, block: int) -> Schedule:
    """Returns what a rank does in an all_reduce in blocks of so many ranks in a row.

    Raises:
        ValueError: the ranks cannot be cut into such blocks.
    """
    if block < 1 or world_size % block:
        raise ValueError(f"{world_size} ranks cannot be cut into blocks of {block}")
    first, place = rank - rank % block, rank % block
    near = [first + i for i in range(block)]
    slices = [BufferSlice(Buffer.OUTPUT, i) for i in range(block)]
    own, total = slices[place], BufferSlice(Buffer.SCRATCH, place)
    others = [peer for peer in near if peer != rank]
    alike = [peer for peer in range(place, world_size, block) if peer != rank]
    steps = [send(peer, slices[peer - first]) for peer in others]
    steps += [combine(peer, own, own, final=not alike and peer == others[-1]) for peer in others]
    steps += [send(peer, own) for peer in alike]
    steps += [combine(peer, total, total if turn else own, peer == alike[-1]) for turn, peer in enumerate(alike)]
    steps += [copy(own, total)] if alike else []
    steps += [send(peer, own) for peer in others]
    steps += [receive(peer, slices[peer - first]) for peer in others]
    return Schedule(Operation.ALL_REDUCE, "in blocks", rank, world_size, -1, block, tuple(steps))


def all_reduce(at: RankTopology) -> BlocksAndSteps:
    """Rails; without them the leaders' ring exchanges the sums that a tree in each host has made."""
    hosts, host, local, me = home = find_host_position(at)
    n_hosts = len(hosts)
    if home.is_even:
        return circulant.all_reduce(home, circulant.LONG)
    tensor, chunks = BufferSlice(Buffer.OUTPUT, 0, n_hosts), one_block_chunks(Buffer.OUTPUT, range(n_hosts))
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += ring.reduce_phase(home.rail, host, chunks, chunks) + ring.gather_phase(home.rail, host, chunks)
    return n_hosts, steps + tree.broadcast_phase(local, me, tensor)


def reduce_scatter(at: RankTopology) -> BlocksAndSteps:
    """Each rank collects its host's sums for its rail, which reduces them; without rails the leaders do both."""
    n, (hosts, host, local, me) = at.world_size, (home := find_host_position(at))
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    if home.is_even:
        return n, _reduce_scatter_on_rails(home)
    tensor, partial = BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n)
    steps = tree.reduce_phase(local, me, tensor, partial, final=False)
    if me == 0:
        held = Buffer.SCRATCH if steps else Buffer.INPUT
        own, into = ([contiguous_slices(buffer, ranks) for ranks in hosts] for buffer in (held, Buffer.SCRATCH))
        steps += ring.reduce_phase(home.rail, host, own, into)
    steps += tree.scatter_phase(local, me, [[rank] for rank in local], Buffer.SCRATCH)
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, at.rank))]


def _reduce_scatter_on_rails(home: HostPosition) -> list[Step]:
    hosts, host, local, me = home
    if len(hosts) == 1:
        return _ring_to_output(local, me, Buffer.INPUT)
    own, into = (
        [
            [BufferSlice(buffer, hosts[host - turn][owner]) for turn in range(1, len(hosts) + 1)]
            for owner in range(len(local))
        ]
        for buffer in (Buffer.INPUT, Buffer.SCRATCH)
    )
    steps = ring.reduce_phase(local, me, own, into, final=False)
    return steps + _ring_to_output(home.rail, host, Buffer.SCRATCH if steps else Buffer.INPUT)


def _ring_to_output(members: Sequence[int], me: int, held: Buffer) -> list[Step]:
    into = one_block_chunks(Buffer.SCRATCH, members)
    into[me] = [OWN_OUTPUT]
    return ring.reduce_phase(members, me, one_block_chunks(held, members), into)


def all_gather(at: RankTopology) -> BlocksAndSteps:
    """Blocks go along the rails, and around each host as the rails bring them; without rails, through the leaders."""
    n, (hosts, host, local, me) = at.world_size, (home := find_host_position(at))
    steps = [copy(BufferSlice(Buffer.OUTPUT, at.rank), OWN_INPUT)]
    if home.is_even:
        in_order = [hosts[host - turn] for turn in range(len(hosts))]
        brought = [[BufferSlice(Buffer.OUTPUT, ranks[owner]) for ranks in in_order] for owner in range(len(local))]
        steps += ring.gather_phase(home.rail, host, one_block_chunks(Buffer.OUTPUT, home.rail))
        return n, steps + ring.gather_phase(local, me, brought)
    steps += tree.gather_phase(local, me, [[rank] for rank in local], Buffer.OUTPUT)
    if me == 0:
        steps += ring.gather_phase(home.rail, host, [contiguous_slices(Buffer.OUTPUT, ranks) for ranks in hosts])
    return n, steps + tree.broadcast_phase(local, me, BufferSlice(Buffer.OUTPUT, 0, n))


def broadcast(at: RankTopology) -> BlocksAndSteps:
    """The tensor goes down a tree of the leaders, then down a tree in each host."""
    _, host, local, me = home = find_host_position(at)
    between = tree.broadcast_phase(home.rail, host, OWN_OUTPUT) if me == 0 else []
    return 1, between + tree.broadcast_phase(local, me, OWN_OUTPUT)


def reduce(at: RankTopology) -> BlocksAndSteps:
    """Sums go up a tree in each host, then up a tree of the leaders."""
    hosts, host, local, me = home = find_host_position(at)
    own, into = (OWN_OUTPUT, OWN_OUTPUT) if at.rank == at.root else (OWN_INPUT, BufferSlice(Buffer.SCRATCH, 0))
    steps = tree.reduce_phase(local, me, own, into, final=len(hosts) == 1)
    if me == 0:
        steps += tree.reduce_phase(home.rail, host, into if steps else own, into)
    return 1, steps


def gather(at: RankTopology) -> BlocksAndSteps:
    """The leaders collect their hosts' blocks and send them up a tree of the leaders."""
    hosts, host, local, me = home = find_host_position(at)
    if me:
        return at.world_size, [send(local[0], OWN_INPUT)]
    store = Buffer.OUTPUT if at.rank == at.root else Buffer.SCRATCH
    steps = [copy(BufferSlice(store, at.rank), OWN_INPUT)]
    steps += [receive(rank, BufferSlice(store, rank)) for rank in local[1:]]
    return at.world_size, steps + tree.gather_phase(home.rail, host, hosts, store)


def scatter(at: RankTopology) -> BlocksAndSteps:
    """Blocks go down a tree of the leaders, which hand them out on their hosts."""
    hosts, host, local, me = home = find_host_position(at)
    if me:
        return at.world_size, [receive(local[0], OWN_OUTPUT)]
    store = Buffer.INPUT if at.rank == at.root else Buffer.SCRATCH
    steps = tree.scatter_phase(home.rail, host, hosts, store)
    steps += [send(rank, BufferSlice(store, rank)) for rank in local[1:]]
    return at.world_size, [*steps, copy(OWN_OUTPUT, BufferSlice(store, at.rank))]


def barrier(at: RankTopology) -> BlocksAndSteps:
    """A tree in each host, and a dissemination barrier between the leaders."""
    _, host, local, me = home = find_host_position(at)
    between = halving_doubling.disseminate_phase(home.rail, host) if me == 0 else []
    return 0, tree.arrive_phase(local, me) + between + tree.leave_phase(local, me)


ALIKE = frozenset((Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER))
"""The operations in which, on equal hosts, every host's ranks do what the first one's do, relative to their host."""

OFFERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.GATHER: gather,
    Operation.SCATTER: scatter,
    Operation.BARRIER: barrier,
}


def _between(case: Case, turns: float, nbytes: float, gamma: float = 0, *, sharing: int = 1) -> float:
    """Returns the seconds of `turns` messages between hosts while `sharing` ranks of a host send at once."""
    link = case.model.between_hosts
    return turns * (link.alpha_s + nbytes * (sharing * link.beta_s_per_byte + gamma))


def _within(case: Case, turns: float, nbytes: float, gamma: float = 0) -> float:
    return turns * message_s(case.model.within_host, nbytes, gamma)


def _rails(case: Case, gamma: float) -> float:
    """Returns the seconds of a ring in the host over slices, block by block, and of one between hosts."""
    inside = (case.local - 1) * (case.n_hosts - 1) * case.model.within_host.alpha_s
    return (
        inside
        + _within(case, case.local - 1, case.nbytes / case.local, gamma)
        + _between(case, case.n_hosts - 1, case.block, gamma, sharing=case.local)
    )


def _leaders_ring(case: Case, gamma: float) -> float:
    return _between(case, case.n_hosts - 1, case.nbytes / case.n_hosts, gamma)


def _through_leaders(case: Case, gamma: float = 0) -> float:
    """Returns the seconds in which all bytes go through a tree in the host and a tree between hosts."""
    return _within(case, doubling_rounds(case.local), case.nbytes, gamma) + _between(
        case, doubling_rounds(case.n_hosts), case.nbytes, gamma
    )


def _even(case: Case) -> bool:
    return len(set(case.host_sizes)) == 1


def _hierarchical_all_reduce(case: Case) -> float:
    if _even(case):
        return circulant.cost(case, circulant.LONG)
    trees = _within(case, doubling_rounds(case.local), case.nbytes, case.gamma) + _within(
        case, doubling_rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, case.gamma) + _leaders_ring(case, 0)


def _hierarchical_reduce_scatter(case: Case) -> float:
    if _even(case):
        return _rails(case, case.gamma)
    trees = _within(case, doubling_rounds(case.local), case.nbytes, case.gamma) + _within(
        case, doubling_rounds(case.local), case.local * case.block / 2
    )
    return trees + _leaders_ring(case, case.gamma)


def _hierarchical_all_gather(case: Case) -> float:
    if _even(case):
        return _rails(case, 0)
    trees = _within(case, doubling_rounds(case.local), case.local * case.block / 2) + _within(
        case, doubling_rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, 0)


def _hierarchical_gather(case: Case) -> float:
    """Returns the seconds of a gather one by one in the host, then in a tree between hosts.

    The last level of the tree moves half of all blocks.
    """
    levels = [min(1 << level, case.n_hosts - (1 << level)) for level in range(doubling_rounds(case.n_hosts))]
    between = sum(_between(case, 1, width * case.local * case.block) for width in levels)
    return _within(case, case.local - 1, case.block) + between


COSTS: dict[Operation, Cost] = {
    Operation.ALL_REDUCE: _hierarchical_all_reduce,
    Operation.REDUCE_SCATTER: _hierarchical_reduce_scatter,
    Operation.ALL_GATHER: _hierarchical_all_gather,
    Operation.BROADCAST: _through_leaders,
    Operation.REDUCE: lambda case: _through_leaders(case, case.gamma),
    Operation.GATHER: _hierarchical_gather,
    Operation.SCATTER: _hierarchical_gather,
    Operation.BARRIER: lambda case: (
        _within(case, 2 * doubling_rounds(case.local), 0) + _between(case, doubling_rounds(case.n_hosts), 0)
    ),
}
