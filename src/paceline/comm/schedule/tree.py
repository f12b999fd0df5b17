"""The binomial tree, in which every round doubles the number of ranks reached, so n ranks take log2(n) rounds.

The tree is the best choice for short messages. Gather and scatter move each subtree's blocks in a few messages. MPICH
uses the same tree (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH").
The first member of a group is its root; member i's subtree consists of the members i to i + (lowest set bit of i) - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule.cost_model import Case, Cost, doubling_rounds, message_s
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
    contiguous_slices,
    copy,
    receive,
    rotated,
    send,
)


def parent_of(member: int) -> int:
    """Returns the parent of a member other than 0."""
    return member & (member - 1)


def children_of(member: int, n: int) -> list[int]:
    """Returns the children of a member, with the smallest subtree first."""
    reach = member & -member or n
    return [member + (1 << bit) for bit in range(reach.bit_length()) if 1 << bit < reach and member + (1 << bit) < n]


def subtree_of(member: int, n: int) -> range:
    """Returns a member and all members below it."""
    return range(member, min(n, member + (member & -member or n)))


def reduce_phase(
    group: Sequence[int], me: int, own: BufferSlice, into: BufferSlice, *, final: bool = True
) -> list[Step]:
    """Sums all members' `own` in group[0]'s `into`; other members' `into` hold partial sums. group[me] is this rank."""
    steps: list[Step] = []
    children = children_of(me, len(group))
    for child in children:
        complete = final and me == 0 and child == children[-1]
        steps.append(combine(group[child], into, into if steps else own, complete))
    if me:
        steps.append(send(group[parent_of(me)], into if steps else own))
    return steps


def broadcast_phase(group: Sequence[int], me: int, tensor: BufferSlice) -> list[Step]:
    """Sends group[0]'s slice to all members; the largest subtree is served first."""
    steps = [receive(group[parent_of(me)], tensor)] if me else []
    return steps + [send(group[child], tensor) for child in reversed(children_of(me, len(group)))]


def gather_phase(group: Sequence[int], me: int, holdings: Sequence[Sequence[int]], store: Buffer) -> list[Step]:
    """Gathers all blocks on group[0]; member i contributes the blocks holdings[i]. All use the buffer `store`."""
    steps: list[Step] = []
    for child in children_of(me, len(group)):
        steps += [receive(group[child], part) for part in _carried(store, holdings, child)]
    if me:
        steps += [send(group[parent_of(me)], part) for part in _carried(store, holdings, me)]
    return steps


def scatter_phase(group: Sequence[int], me: int, holdings: Sequence[Sequence[int]], store: Buffer) -> list[Step]:
    """Scatters the blocks holdings[i] from group[0] to member i; the reverse of `gather_phase`."""
    steps: list[Step] = []
    if me:
        steps += [receive(group[parent_of(me)], part) for part in _carried(store, holdings, me)]
    for child in reversed(children_of(me, len(group))):
        steps += [send(group[child], part) for part in _carried(store, holdings, child)]
    return steps


def arrive_phase(group: Sequence[int], me: int) -> list[Step]:
    """Reports to group[0] that all members have arrived."""
    steps = [receive(group[child], NOTHING) for child in children_of(me, len(group))]
    return [*steps, send(group[parent_of(me)], NOTHING)] if me else steps


def _carried(store: Buffer, holdings: Sequence[Sequence[int]], member: int) -> list[BufferSlice]:
    return contiguous_slices(store, (block for below in subtree_of(member, len(holdings)) for block in holdings[below]))


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Reduces to rank 0, then broadcasts."""
    world = range(topology.world_size)
    up = reduce_phase(world, topology.rank, OWN_OUTPUT, OWN_OUTPUT)
    return 1, up + broadcast_phase(world, topology.rank, OWN_OUTPUT)


def reduce(topology: RankTopology) -> BlocksAndSteps:
    """Reduces up the tree; partial sums are kept in SCRATCH or, on the root, in its tensor."""
    world = rotated(range(topology.world_size), topology.root)
    me = world.index(topology.rank)
    if me == 0:
        return 1, reduce_phase(world, me, OWN_OUTPUT, OWN_OUTPUT)
    return 1, reduce_phase(world, me, OWN_INPUT, BufferSlice(Buffer.SCRATCH, 0))


def broadcast(topology: RankTopology) -> BlocksAndSteps:
    """Sends the tensor down the tree from the root."""
    world = rotated(range(topology.world_size), topology.root)
    return 1, broadcast_phase(world, world.index(topology.rank), OWN_OUTPUT)


def gather(topology: RankTopology) -> BlocksAndSteps:
    """Sends blocks up the tree; leaves send from INPUT, and inner ranks collect their subtree's blocks in SCRATCH."""
    world = rotated(range(topology.world_size), topology.root)
    me = world.index(topology.rank)
    if me and not children_of(me, topology.world_size):
        return topology.world_size, [send(world[parent_of(me)], OWN_INPUT)]
    store = Buffer.SCRATCH if me else Buffer.OUTPUT
    own = copy(BufferSlice(store, topology.rank), OWN_INPUT)
    return topology.world_size, [own, *gather_phase(world, me, [[rank] for rank in world], store)]


def scatter(topology: RankTopology) -> BlocksAndSteps:
    """Sends blocks down the tree; leaves receive into OUTPUT, and inner ranks keep a subtree's blocks in SCRATCH."""
    world = rotated(range(topology.world_size), topology.root)
    me = world.index(topology.rank)
    if me and not children_of(me, topology.world_size):
        return topology.world_size, [receive(world[parent_of(me)], OWN_OUTPUT)]
    store = Buffer.SCRATCH if me else Buffer.INPUT
    own = copy(OWN_OUTPUT, BufferSlice(store, topology.rank))
    return topology.world_size, [*scatter_phase(world, me, [[rank] for rank in world], store), own]


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Gathers to rank 0, then broadcasts all blocks."""
    world = range(topology.world_size)
    steps = [copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT)]
    steps += gather_phase(world, topology.rank, [[rank] for rank in world], Buffer.OUTPUT)
    return topology.world_size, steps + broadcast_phase(
        world, topology.rank, BufferSlice(Buffer.OUTPUT, 0, topology.world_size)
    )


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Reduces to rank 0, then scatters."""
    n = topology.world_size
    world = range(n)
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    steps = reduce_phase(world, topology.rank, BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n))
    steps += scatter_phase(world, topology.rank, [[rank] for rank in world], Buffer.SCRATCH)
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, topology.rank))]


def barrier(topology: RankTopology) -> BlocksAndSteps:
    """Reports arrivals up the tree, then sends permission to leave down the tree."""
    world = range(topology.world_size)
    return 0, arrive_phase(world, topology.rank) + broadcast_phase(world, topology.rank, NOTHING)


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


def _levels(case: Case, nbytes: float, gamma: float = 0) -> float:
    """Returns the time, in seconds, of a tree in which each level moves all bytes."""
    return sum(message_s(case.link(1 << level), nbytes, gamma) for level in range(doubling_rounds(case.n)))


def _subtrees(case: Case) -> float:
    """Returns the time, in seconds, of a tree in which each level moves the blocks of a subtree."""
    widths = [1 << level for level in range(doubling_rounds(case.n))]
    return sum(message_s(case.link(width), min(width, case.n - width) * case.block) for width in widths)


COSTS: dict[Operation, Cost] = {
    Operation.ALL_REDUCE: lambda case: _levels(case, case.nbytes, case.gamma) + _levels(case, case.nbytes),
    Operation.REDUCE: lambda case: _levels(case, case.nbytes, case.gamma),
    Operation.BROADCAST: lambda case: _levels(case, case.nbytes),
    Operation.GATHER: _subtrees,
    Operation.SCATTER: _subtrees,
    Operation.ALL_GATHER: lambda case: _subtrees(case) + _levels(case, case.nbytes),
    Operation.REDUCE_SCATTER: lambda case: _levels(case, case.nbytes, case.gamma) + _subtrees(case),
    Operation.BARRIER: lambda case: 2 * _levels(case, 0),
}
