"""Tests of reductions within a host in blocks of ranks, for every number of ranks."""

from __future__ import annotations

import pytest
from sampling import FACTOR

from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.simulation import simulate_schedules
from paceline.comm.schedule.steps import Buffer, BufferSlice, Operation, Schedule, combine, copy, receive, send
from paceline.comm.schedule.verify import verify

NEAR = LinkCost(1e-8, 1e-11)
NBYTES = 1 << 20


def reduce_in_blocks(rank: int, world_size: int, block: int) -> Schedule:
    """Returns a rank's schedule of the all-reduce in native/host/reductions.cpp, in blocks of consecutive ranks.

    A block is a part of the machine. Each of its ranks reduces one slice of the tensor over the block. Ranks with the
    same position in their blocks then exchange and reduce their slices, and the results are distributed within each
    block.

    Raises:
        ValueError: the ranks cannot be divided into such blocks.
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


def world(world_size, block):
    return [reduce_in_blocks(rank, world_size, block) for rank in range(world_size)]


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16])
def test_sums_in_blocks_are_sums_over_all_ranks(block):
    for blocks in range(1, 1 + 48 // block if FACTOR == 1 else 1 + 128 // block):
        verify(world(blocks * block, block))


def test_ranks_that_do_not_fit_into_blocks_are_refused():
    with pytest.raises(ValueError, match="10 ranks cannot be cut into blocks of 4"):
        reduce_in_blocks(0, 10, 4)


def seconds(world_size, block, domains, far):
    """Returns the predicted time on a machine of equal parts. Messages between parts cost `far` times as much."""
    model = CostModel(NEAR, LinkCost(far * NEAR.alpha_s, far * NEAR.beta_s_per_byte), 1e-11)
    in_part = world_size // domains
    parts = tuple(tuple(range(first, first + in_part)) for first in range(0, world_size, in_part))
    return simulate_schedules(world(world_size, block), Network.of_costs(model, parts), NBYTES).seconds


@pytest.mark.parametrize(("domains", "in_part"), [(2, 16), (2, 4), (4, 8), (4, 4)])
def test_blocks_pay_where_the_parts_of_a_machine_share_a_link(domains, in_part):
    n = domains * in_part
    assert seconds(n, in_part, domains, far=2) < 0.75 * seconds(n, n, domains, far=2)


def test_blocks_do_not_pay_where_they_need_not_or_are_many():
    assert seconds(32, 8, 1, far=1) > seconds(32, 32, 1, far=1)
    assert seconds(32, 4, 8, far=2) > seconds(32, 32, 8, far=2)
