"""The star, or parameter server: everything goes through one rank, the root or rank 0.

It is here for comparison. A message takes two hops at most, but all bytes of all ranks cross the one link of the
middle, so its time grows with the world while that of the other algorithms hardly does. It may win for a handful of
ranks and tiny tensors.
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


def _others(at: RankTopology, middle: int) -> list[int]:
    return [(middle + distance) % at.world_size for distance in range(1, at.world_size)]


def _add_up(others: list[int], own: BufferSlice, into: BufferSlice) -> list[Step]:
    """Adds the others' tensors one after another."""
    return [
        combine(peer, into, into if turn else own, final=turn == len(others) - 1) for turn, peer in enumerate(others)
    ]


def all_reduce(at: RankTopology) -> BlocksAndSteps:
    """Rank 0 sums all tensors and sends the result to each rank."""
    others = _others(at, 0)
    if at.rank:
        return 1, [send(0, OWN_OUTPUT), receive(0, OWN_OUTPUT)]
    return 1, _add_up(others, OWN_OUTPUT, OWN_OUTPUT) + [send(peer, OWN_OUTPUT) for peer in others]


def reduce(at: RankTopology) -> BlocksAndSteps:
    """The root sums all tensors."""
    if at.rank != at.root:
        return 1, [send(at.root, OWN_INPUT)]
    return 1, _add_up(_others(at, at.root), OWN_OUTPUT, OWN_OUTPUT)


def broadcast(at: RankTopology) -> BlocksAndSteps:
    """The root sends its tensor to each rank."""
    if at.rank != at.root:
        return 1, [receive(at.root, OWN_OUTPUT)]
    return 1, [send(peer, OWN_OUTPUT) for peer in _others(at, at.root)]


def gather(at: RankTopology) -> BlocksAndSteps:
    """The root receives a block from each rank."""
    if at.rank != at.root:
        return at.world_size, [send(at.root, OWN_INPUT)]
    steps = [receive(peer, BufferSlice(Buffer.OUTPUT, peer)) for peer in _others(at, at.root)]
    return at.world_size, [copy(BufferSlice(Buffer.OUTPUT, at.rank), OWN_INPUT), *steps]


def scatter(at: RankTopology) -> BlocksAndSteps:
    """The root sends each rank its block."""
    if at.rank != at.root:
        return at.world_size, [receive(at.root, OWN_OUTPUT)]
    steps = [send(peer, BufferSlice(Buffer.INPUT, peer)) for peer in _others(at, at.root)]
    return at.world_size, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.INPUT, at.rank))]


def all_gather(at: RankTopology) -> BlocksAndSteps:
    """Rank 0 collects all blocks and sends all of them to each rank."""
    n, everything = at.world_size, BufferSlice(Buffer.OUTPUT, 0, at.world_size)
    if at.rank:
        return n, [send(0, OWN_INPUT), receive(0, everything)]
    steps = [copy(BufferSlice(Buffer.OUTPUT, 0), OWN_INPUT)]
    steps += [receive(peer, BufferSlice(Buffer.OUTPUT, peer)) for peer in _others(at, 0)]
    return n, steps + [send(peer, everything) for peer in _others(at, 0)]


def reduce_scatter(at: RankTopology) -> BlocksAndSteps:
    """Rank 0 sums all tensors and sends each rank its block."""
    n, others = at.world_size, _others(at, 0)
    if n == 1:
        return 1, [copy(OWN_OUTPUT, OWN_INPUT)]
    if at.rank:
        return n, [send(0, BufferSlice(Buffer.INPUT, 0, n)), receive(0, OWN_OUTPUT)]
    steps = _add_up(others, BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n))
    steps += [send(peer, BufferSlice(Buffer.SCRATCH, peer)) for peer in others]
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, 0))]


def barrier(at: RankTopology) -> BlocksAndSteps:
    """All ranks send a token to rank 0, which then answers each."""
    if at.rank:
        return 0, [send(0, NOTHING), receive(0, NOTHING)]
    others = _others(at, 0)
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
    """Returns the seconds in which the middle exchanges `nbytes` with each of the others, one after another."""
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
