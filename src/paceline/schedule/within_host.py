"""The reductions of native/host/reducing.cpp as schedules, which can be proved and timed without such a machine.

They are not among the algorithms that a call can choose: within a host, the core does the same directly in shared
memory, without messages. Each rank of a block of ranks, which is a part of the machine, reduces one slice of the tensor
over its block; the ranks with the same place in all blocks exchange their slices and reduce them; and each block passes
the results around. With one block that is what the core does where memory is equally near to all ranks.
"""

from __future__ import annotations

from paceline.schedule.steps import Buffer, Operation, Schedule, Slice, combine, copy, receive, send


def reduce_in_blocks(rank: int, world_size: int, block: int) -> Schedule:
    """Returns what a rank does in an all_reduce in blocks of so many ranks in a row.

    Raises:
        ValueError: the ranks cannot be cut into such blocks.
    """
    if block < 1 or world_size % block:
        raise ValueError(f"{world_size} ranks cannot be cut into blocks of {block}")
    first, place = rank - rank % block, rank % block
    near = [first + i for i in range(block)]
    slices = [Slice(Buffer.OUTPUT, i) for i in range(block)]
    own, total = slices[place], Slice(Buffer.SCRATCH, place)
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
