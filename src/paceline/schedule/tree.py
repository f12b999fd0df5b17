"""The binomial tree: every round doubles the ranks that are done, so a world takes log2(n) rounds.

The best where messages are short. Gather and scatter move each subtree's blocks as few messages. The tree is the one
of MPICH (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH").
The first member of a group is its root; member i's subtree is the members i to i + (lowest set bit of i) - 1.
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
    rotated,
    runs,
    send,
)


def parent_of(member: int) -> int:
    """Return the parent of a member other than 0."""
    return member & (member - 1)


def children_of(member: int, n: int) -> list[int]:
    """Return the children of a member, the one with the smallest subtree first."""
    reach = member & -member or n
    return [member + (1 << bit) for bit in range(reach.bit_length()) if 1 << bit < reach and member + (1 << bit) < n]


def subtree_of(member: int, n: int) -> range:
    """Return a member and all below it."""
    return range(member, min(n, member + (member & -member or n)))


def reduce_phase(group: Sequence[int], me: int, own: Slice, into: Slice, *, final: bool = True) -> list[Step]:
    """Sum up all members' `own` in group[0]'s `into`; the others' `into` holds partial sums. group[me] is this rank."""
    steps: list[Step] = []
    children = children_of(me, len(group))
    for child in children:
        complete = final and me == 0 and child == children[-1]
        steps.append(combine(group[child], into, into if steps else own, complete))
    if me:
        steps.append(send(group[parent_of(me)], into if steps else own))
    return steps


def broadcast_phase(group: Sequence[int], me: int, tensor: Slice) -> list[Step]:
    """Send group[0]'s slice to all members, the largest subtree first."""
    steps = [receive(group[parent_of(me)], tensor)] if me else []
    return steps + [send(group[child], tensor) for child in reversed(children_of(me, len(group)))]


def gather_phase(group: Sequence[int], me: int, holdings: Sequence[Sequence[int]], store: Buffer) -> list[Step]:
    """Bring all blocks to group[0]; member i comes with the blocks holdings[i]. All keep them in `store`."""
    steps: list[Step] = []
    for child in children_of(me, len(group)):
        steps += [receive(group[child], part) for part in _carried(store, holdings, child)]
    if me:
        steps += [send(group[parent_of(me)], part) for part in _carried(store, holdings, me)]
    return steps


def scatter_phase(group: Sequence[int], me: int, holdings: Sequence[Sequence[int]], store: Buffer) -> list[Step]:
    """Bring the blocks holdings[i] from group[0] to member i: `gather_phase` backwards."""
    steps: list[Step] = []
    if me:
        steps += [receive(group[parent_of(me)], part) for part in _carried(store, holdings, me)]
    for child in reversed(children_of(me, len(group))):
        steps += [send(group[child], part) for part in _carried(store, holdings, child)]
    return steps


def arrive_phase(group: Sequence[int], me: int) -> list[Step]:
    """Tell group[0] that all members have come."""
    steps = [receive(group[child], NOTHING) for child in children_of(me, len(group))]
    return [*steps, send(group[parent_of(me)], NOTHING)] if me else steps


def leave_phase(group: Sequence[int], me: int) -> list[Step]:
    """Let group[0] tell all members to leave."""
    return broadcast_phase(group, me, NOTHING)


def _carried(store: Buffer, holdings: Sequence[Sequence[int]], member: int) -> list[Slice]:
    return runs(store, (block for below in subtree_of(member, len(holdings)) for block in holdings[below]))


def all_reduce(at: Place) -> Plan:
    """Reduce to rank 0, then broadcast."""
    world = range(at.world_size)
    up = reduce_phase(world, at.rank, OWN_OUTPUT, OWN_OUTPUT)
    return 1, up + broadcast_phase(world, at.rank, OWN_OUTPUT)


def reduce(at: Place) -> Plan:
    """Partial sums are kept in SCRATCH, the root's in its tensor."""
    world = rotated(range(at.world_size), at.root)
    me = world.index(at.rank)
    if me == 0:
        return 1, reduce_phase(world, me, OWN_OUTPUT, OWN_OUTPUT)
    return 1, reduce_phase(world, me, OWN_INPUT, Slice(Buffer.SCRATCH, 0))


def broadcast(at: Place) -> Plan:
    """Down the tree from the root."""
    world = rotated(range(at.world_size), at.root)
    return 1, broadcast_phase(world, world.index(at.rank), OWN_OUTPUT)


def gather(at: Place) -> Plan:
    """Up the tree; a leaf sends its INPUT as it is, the others collect in SCRATCH."""
    world = rotated(range(at.world_size), at.root)
    me = world.index(at.rank)
    if me and not children_of(me, at.world_size):
        return at.world_size, [send(world[parent_of(me)], OWN_INPUT)]
    store = Buffer.SCRATCH if me else Buffer.OUTPUT
    own = copy(Slice(store, at.rank), OWN_INPUT)
    return at.world_size, [own, *gather_phase(world, me, [[rank] for rank in world], store)]


def scatter(at: Place) -> Plan:
    """Down the tree; a leaf receives its OUTPUT, the others keep a subtree's blocks in SCRATCH."""
    world = rotated(range(at.world_size), at.root)
    me = world.index(at.rank)
    if me and not children_of(me, at.world_size):
        return at.world_size, [receive(world[parent_of(me)], OWN_OUTPUT)]
    store = Buffer.SCRATCH if me else Buffer.INPUT
    own = copy(OWN_OUTPUT, Slice(store, at.rank))
    return at.world_size, [*scatter_phase(world, me, [[rank] for rank in world], store), own]


def all_gather(at: Place) -> Plan:
    """Gather to rank 0, then broadcast all blocks."""
    world = range(at.world_size)
    steps = [copy(Slice(Buffer.OUTPUT, at.rank), OWN_INPUT)]
    steps += gather_phase(world, at.rank, [[rank] for rank in world], Buffer.OUTPUT)
    return at.world_size, steps + broadcast_phase(world, at.rank, Slice(Buffer.OUTPUT, 0, at.world_size))


def reduce_scatter(at: Place) -> Plan:
    """Reduce to rank 0, then scatter."""
    n = at.world_size
    world = range(n)
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    steps = reduce_phase(world, at.rank, Slice(Buffer.INPUT, 0, n), Slice(Buffer.SCRATCH, 0, n))
    steps += scatter_phase(world, at.rank, [[rank] for rank in world], Buffer.SCRATCH)
    return n, [*steps, copy(OWN_OUTPUT, Slice(Buffer.SCRATCH, at.rank))]


def barrier(at: Place) -> Plan:
    """Up the tree and down again."""
    world = range(at.world_size)
    return 0, arrive_phase(world, at.rank) + leave_phase(world, at.rank)


OFFERS: dict[Operation, Builder] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
}
