"""The star, or parameter server, in which all data passes through one rank (the root or rank 0).

The star serves as a baseline. Data takes at most two hops, but all ranks' bytes cross the central rank's link, so the
duration grows with the world size much faster than that of other algorithms. With few ranks and tiny tensors, the star
can be the fastest algorithm.
"""

from __future__ import annotations

from paceline.comm.schedule.cost_model import Case, Cost, message_s
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
    send,
)


def _others(topology: RankTopology, middle: int) -> list[int]:
    return [(middle + distance) % topology.world_size for distance in range(1, topology.world_size)]


def _add_up(others: list[int], own: BufferSlice, into: BufferSlice) -> list[Step]:
    """Receives and adds the tensors of all other ranks, one after another."""
    return [
        combine(peer, into, into if turn else own, final=turn == len(others) - 1) for turn, peer in enumerate(others)
    ]


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Rank 0 sums all tensors and sends the result to each rank."""
    others = _others(topology, 0)
    if topology.rank:
        return 1, [send(0, OWN_OUTPUT), receive(0, OWN_OUTPUT)]
    return 1, _add_up(others, OWN_OUTPUT, OWN_OUTPUT) + [send(peer, OWN_OUTPUT) for peer in others]


def reduce(topology: RankTopology) -> BlocksAndSteps:
    """The root sums all tensors."""
    if topology.rank != topology.root:
        return 1, [send(topology.root, OWN_INPUT)]
    return 1, _add_up(_others(topology, topology.root), OWN_OUTPUT, OWN_OUTPUT)


def broadcast(topology: RankTopology) -> BlocksAndSteps:
    """The root sends its tensor to each rank."""
    if topology.rank != topology.root:
        return 1, [receive(topology.root, OWN_OUTPUT)]
    return 1, [send(peer, OWN_OUTPUT) for peer in _others(topology, topology.root)]


def gather(topology: RankTopology) -> BlocksAndSteps:
    """The root receives a block from each rank."""
    if topology.rank != topology.root:
        return topology.world_size, [send(topology.root, OWN_INPUT)]
    steps = [receive(peer, BufferSlice(Buffer.OUTPUT, peer)) for peer in _others(topology, topology.root)]
    return topology.world_size, [copy(BufferSlice(Buffer.OUTPUT, topology.rank), OWN_INPUT), *steps]


def scatter(topology: RankTopology) -> BlocksAndSteps:
    """The root sends each rank its block."""
    if topology.rank != topology.root:
        return topology.world_size, [receive(topology.root, OWN_OUTPUT)]
    steps = [send(peer, BufferSlice(Buffer.INPUT, peer)) for peer in _others(topology, topology.root)]
    return topology.world_size, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.INPUT, topology.rank))]


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Rank 0 collects all blocks and sends all of them to each rank."""
    n, everything = topology.world_size, BufferSlice(Buffer.OUTPUT, 0, topology.world_size)
    if topology.rank:
        return n, [send(0, OWN_INPUT), receive(0, everything)]
    steps = [copy(BufferSlice(Buffer.OUTPUT, 0), OWN_INPUT)]
    steps += [receive(peer, BufferSlice(Buffer.OUTPUT, peer)) for peer in _others(topology, 0)]
    return n, steps + [send(peer, everything) for peer in _others(topology, 0)]


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Rank 0 sums all tensors and sends each rank its block."""
    n, others = topology.world_size, _others(topology, 0)
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    if topology.rank:
        return n, [send(0, BufferSlice(Buffer.INPUT, 0, n)), receive(0, OWN_OUTPUT)]
    steps = _add_up(others, BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n))
    steps += [send(peer, BufferSlice(Buffer.SCRATCH, peer)) for peer in others]
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, 0))]


def barrier(topology: RankTopology) -> BlocksAndSteps:
    """All ranks send a token to rank 0, which then sends a token back to each of them."""
    if topology.rank:
        return 0, [send(0, NOTHING), receive(0, NOTHING)]
    others = _others(topology, 0)
    return 0, [receive(peer, NOTHING) for peer in others] + [send(peer, NOTHING) for peer in others]


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


def _serve(case: Case, nbytes: float, gamma: float = 0) -> float:
    """Returns the time, in seconds, for exchanging `nbytes` between the central rank and each other rank in turn."""
    near, far = case.local - 1, case.n - case.local
    return near * message_s(case.model.within_host, nbytes, gamma) + far * message_s(
        case.model.between_hosts, nbytes, gamma
    )


COSTS: dict[Operation, Cost] = {
    Operation.ALL_REDUCE: lambda case: _serve(case, case.nbytes, case.gamma) + _serve(case, case.nbytes),
    Operation.REDUCE: lambda case: _serve(case, case.nbytes, case.gamma),
    Operation.BROADCAST: lambda case: _serve(case, case.nbytes),
    Operation.GATHER: lambda case: _serve(case, case.block),
    Operation.SCATTER: lambda case: _serve(case, case.block),
    Operation.ALL_GATHER: lambda case: _serve(case, case.block) + _serve(case, case.nbytes),
    Operation.REDUCE_SCATTER: lambda case: _serve(case, case.nbytes, case.gamma) + _serve(case, case.block),
    Operation.BARRIER: lambda case: 2 * _serve(case, 0),
}
