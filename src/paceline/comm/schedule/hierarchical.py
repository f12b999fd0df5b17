"""Hierarchical algorithms, which exchange data within each host first, and then between hosts over the slower links.

If all hosts have the same number of ranks, the l-th ranks on all hosts form the l-th rail, which owns the l-th slice of
the tensor: rings within the hosts reduce the slice, the rail exchanges it between hosts, and rings within the hosts
distribute the slices. All ranks thus use the network at the same time (as in the hierarchical all-reduce of Horovod and
NCCL; Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision"). If hosts have different
numbers of ranks, and in operations with a root, the first rank on each host is the leader and represents its host; on
the root's host the root is the leader. `circulant.py` implements the all-reduce on rails.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule import circulant, halving_doubling, ring, tree
from paceline.comm.schedule.cost_model import Case, Cost, doubling_rounds, message_s
from paceline.comm.schedule.steps import (
    NOTHING,
    OWN_INPUT,
    OWN_OUTPUT,
    BlocksAndSteps,
    Buffer,
    BufferSlice,
    Builder,
    HostPosition,
    Operation,
    RankTopology,
    Step,
    contiguous_slices,
    copy,
    find_host_position,
    one_block_chunks,
    receive,
    send,
)


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Uses rails; with uneven hosts, a tree on each host sums the tensors, and a ring of leaders exchanges the sums."""
    hosts, host, local, me = home = find_host_position(topology)
    n_hosts = len(hosts)
    if home.is_even:
        return circulant.all_reduce(home, circulant.LONG)
    tensor, chunks = BufferSlice(Buffer.OUTPUT, 0, n_hosts), one_block_chunks(Buffer.OUTPUT, range(n_hosts))
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += ring.reduce_phase(home.rail, host, chunks, chunks) + ring.gather_phase(home.rail, host, chunks)
    return n_hosts, steps + tree.broadcast_phase(local, me, tensor)


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Sums within each host for each rail, then reduces along the rails; with uneven hosts, leaders do both."""
    n, (hosts, host, local, me) = topology.world_size, (home := find_host_position(topology))
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
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, topology.rank))]


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


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Passes blocks along the rails, then around the ring in each host.

    If the hosts have different numbers of ranks, the blocks pass through the leaders instead."""
    n, (hosts, host, local, me) = topology.world_size, (home := find_host_position(topology))
    steps = [copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT)]
    if home.is_even:
        in_order = [hosts[host - turn] for turn in range(len(hosts))]
        brought = [[BufferSlice(Buffer.OUTPUT, ranks[owner]) for ranks in in_order] for owner in range(len(local))]
        steps += ring.gather_phase(home.rail, host, one_block_chunks(Buffer.OUTPUT, home.rail))
        return n, steps + ring.gather_phase(local, me, brought)
    steps += tree.gather_phase(local, me, [[rank] for rank in local], Buffer.OUTPUT)
    if me == 0:
        steps += ring.gather_phase(home.rail, host, [contiguous_slices(Buffer.OUTPUT, ranks) for ranks in hosts])
    return n, steps + tree.broadcast_phase(local, me, BufferSlice(Buffer.OUTPUT, 0, n))


def broadcast(topology: RankTopology) -> BlocksAndSteps:
    """Sends the tensor down a tree of leaders, then down a tree on each host."""
    _, host, local, me = home = find_host_position(topology)
    between = tree.broadcast_phase(home.rail, host, OWN_OUTPUT) if me == 0 else []
    return 1, between + tree.broadcast_phase(local, me, OWN_OUTPUT)


def reduce(topology: RankTopology) -> BlocksAndSteps:
    """Sends sums up a tree on each host, then up a tree of leaders."""
    hosts, host, local, me = home = find_host_position(topology)
    own, into = (
        (OWN_OUTPUT, OWN_OUTPUT) if topology.rank == topology.root else (OWN_INPUT, BufferSlice(Buffer.SCRATCH, 0))
    )
    steps = tree.reduce_phase(local, me, own, into, final=len(hosts) == 1)
    if me == 0:
        steps += tree.reduce_phase(home.rail, host, into if steps else own, into)
    return 1, steps


def gather(topology: RankTopology) -> BlocksAndSteps:
    """Collects each host's blocks on its leader, then sends them up a tree of leaders."""
    hosts, host, local, me = home = find_host_position(topology)
    if me:
        return topology.world_size, [send(local[0], OWN_INPUT)]
    store = Buffer.OUTPUT if topology.rank == topology.root else Buffer.SCRATCH
    steps = [copy(BufferSlice(store, topology.rank), OWN_INPUT)]
    steps += [receive(rank, BufferSlice(store, rank)) for rank in local[1:]]
    return topology.world_size, steps + tree.gather_phase(home.rail, host, hosts, store)


def scatter(topology: RankTopology) -> BlocksAndSteps:
    """Sends blocks down a tree of leaders, which distribute them within their hosts."""
    hosts, host, local, me = home = find_host_position(topology)
    if me:
        return topology.world_size, [receive(local[0], OWN_OUTPUT)]
    store = Buffer.INPUT if topology.rank == topology.root else Buffer.SCRATCH
    steps = tree.scatter_phase(home.rail, host, hosts, store)
    steps += [send(rank, BufferSlice(store, rank)) for rank in local[1:]]
    return topology.world_size, [*steps, copy(OWN_OUTPUT, BufferSlice(store, topology.rank))]


def barrier(topology: RankTopology) -> BlocksAndSteps:
    """Synchronizes the ranks on each host with a tree, and the leaders with a dissemination barrier."""
    _, host, local, me = home = find_host_position(topology)
    between = halving_doubling.disseminate_phase(home.rail, host) if me == 0 else []
    return 0, tree.arrive_phase(local, me) + between + tree.broadcast_phase(local, me, NOTHING)


ALIKE = frozenset((Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER))
"""The operations in which equal hosts perform the same steps relative to their position."""

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
    """Returns the time, in seconds, for `turns` messages between hosts while `sharing` ranks per host send at once."""
    link = case.model.between_hosts
    return turns * (link.alpha_s + nbytes * (sharing * link.beta_s_per_byte + gamma))


def _within(case: Case, turns: float, nbytes: float, gamma: float = 0) -> float:
    return turns * message_s(case.model.within_host, nbytes, gamma)


def _rails(case: Case, gamma: float) -> float:
    """Returns the time, in seconds, for a ring over slices within hosts, block by block, and a ring between hosts."""
    inside = (case.local - 1) * (case.n_hosts - 1) * case.model.within_host.alpha_s
    return (
        inside
        + _within(case, case.local - 1, case.nbytes / case.local, gamma)
        + _between(case, case.n_hosts - 1, case.block, gamma, sharing=case.local)
    )


def _leaders_ring(case: Case, gamma: float) -> float:
    return _between(case, case.n_hosts - 1, case.nbytes / case.n_hosts, gamma)


def _through_leaders(case: Case, gamma: float = 0) -> float:
    """Returns the time, in seconds, for passing all bytes through a tree on the host and a tree between hosts."""
    return _within(case, doubling_rounds(case.local), case.nbytes, gamma) + _between(
        case, doubling_rounds(case.n_hosts), case.nbytes, gamma
    )


def _hierarchical_all_reduce(case: Case) -> float:
    if case.is_even:
        return circulant.cost(case, circulant.LONG)
    trees = _within(case, doubling_rounds(case.local), case.nbytes, case.gamma) + _within(
        case, doubling_rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, case.gamma) + _leaders_ring(case, 0)


def _hierarchical_reduce_scatter(case: Case) -> float:
    if case.is_even:
        return _rails(case, case.gamma)
    trees = _within(case, doubling_rounds(case.local), case.nbytes, case.gamma) + _within(
        case, doubling_rounds(case.local), case.local * case.block / 2
    )
    return trees + _leaders_ring(case, case.gamma)


def _hierarchical_all_gather(case: Case) -> float:
    if case.is_even:
        return _rails(case, 0)
    trees = _within(case, doubling_rounds(case.local), case.local * case.block / 2) + _within(
        case, doubling_rounds(case.local), case.nbytes
    )
    return trees + _leaders_ring(case, 0)


def _hierarchical_gather(case: Case) -> float:
    """Returns the time, in seconds, for a sequential gather within the host and a tree gather between hosts."""
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
