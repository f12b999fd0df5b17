"""Quantized algorithms, which round data sent between hosts to a few bits and keep data within a host exact.

Ranks first sum within each host, as in `hierarchical.py`, and the l-th ranks on all hosts form the l-th rail. On a rail
each rank packs its host's sum, sends to every other rank the part that the receiver owns, and adds up the parts that it
receives. The exchange is direct, because each hop of a ring would round again. The owner of a sum packs it once, sends
it to all ranks, and itself also uses the unpacked sum. All ranks therefore get the same bits, as the tests prove.

Each byte crosses the network the same number of times as in a ring. Each element is rounded twice, once in the sum of a
host and once in the total. A rank packs each element of its slice once per call, so one array of residuals is
sufficient for error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; the feedback covers both
roundings as in Tang et al. 2021, "1-bit Adam").

With two hosts, both send their entire sums instead, and both add up the packed sums. This requires the same number of
bytes but fewer sequential messages, and each element is rounded only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from paceline.comm.schedule import hierarchical, ring, tree
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
    Step,
    add,
    copy,
    find_host_position,
    pack,
    receive,
    send,
    unpack,
)

WIRES = ("bf16", "int8", "int4")
"""The wire formats; the code of a format in native/wire/wire.hpp is its index in this tuple plus one."""

_SliceOf = Callable[[int], BufferSlice]  # maps a block of the tensor to the slice in which a rank keeps it


def all_reduce(topology: RankTopology) -> BlocksAndSteps:
    """Uses rails if the hosts are even, and otherwise trees within the hosts and an exchange between their leaders."""
    if len(topology.hosts) == 1:
        return hierarchical.all_reduce(topology)
    hosts, _, local, me = home = find_host_position(topology)
    n_hosts = len(hosts)
    if home.is_even:
        slices = [[BufferSlice(Buffer.OUTPUT, owner * n_hosts, n_hosts)] for owner in range(len(local))]
        steps = ring.reduce_phase(local, me, slices, slices, final=False)
        steps += _all_reduce_phase(home, [[me * n_hosts + number] for number in range(n_hosts)])
        return topology.world_size, steps + ring.gather_phase(local, me, slices)
    tensor = BufferSlice(Buffer.OUTPUT, 0, n_hosts)
    steps = tree.reduce_phase(local, me, tensor, tensor, final=False)
    if me == 0:
        steps += _all_reduce_phase(home, [[number] for number in range(n_hosts)])
    return n_hosts, steps + tree.broadcast_phase(local, me, tensor)


def reduce_scatter(topology: RankTopology) -> BlocksAndSteps:
    """Ranks collect and exchange their host's sums for their rail; with uneven hosts, only leaders do so."""
    if len(topology.hosts) == 1:
        return hierarchical.reduce_scatter(topology)
    n, (hosts, _, local, me) = topology.world_size, (home := find_host_position(topology))
    if home.is_even:
        own, into = (
            [[BufferSlice(buffer, ranks[owner]) for ranks in hosts] for owner in range(len(local))]
            for buffer in (Buffer.INPUT, Buffer.SCRATCH)
        )
        steps = ring.reduce_phase(local, me, own, into, final=False)
        held = Buffer.SCRATCH if steps else Buffer.INPUT
        steps.append(copy(OWN_OUTPUT, BufferSlice(held, topology.rank)))
        blocks = [[rank] for rank in home.rail]
        return n, steps + _reduce_phase(home, blocks, lambda b: BufferSlice(held, b), lambda _: OWN_OUTPUT, count())
    tensor, partial = BufferSlice(Buffer.INPUT, 0, n), BufferSlice(Buffer.SCRATCH, 0, n)
    steps = tree.reduce_phase(local, me, tensor, partial, final=False)
    if me == 0:
        held = Buffer.SCRATCH if steps else Buffer.INPUT
        if held is Buffer.INPUT:
            steps.append(copy(BufferSlice(Buffer.SCRATCH, topology.rank), BufferSlice(Buffer.INPUT, topology.rank)))
        steps += _reduce_phase(
            home, hosts, lambda b: BufferSlice(held, b), lambda b: BufferSlice(Buffer.SCRATCH, b), count()
        )
    steps += tree.scatter_phase(local, me, [[rank] for rank in local], Buffer.SCRATCH)
    return n, [*steps, copy(OWN_OUTPUT, BufferSlice(Buffer.SCRATCH, topology.rank))]


def all_gather(topology: RankTopology) -> BlocksAndSteps:
    """Passes blocks along the rails or through the leaders; all ranks receive the rounded blocks."""
    if len(topology.hosts) == 1:
        return hierarchical.all_gather(topology)
    n, (hosts, host, local, me) = topology.world_size, (home := find_host_position(topology))
    mine = BufferSlice(Buffer.OUTPUT, topology.rank)
    steps = [copy(mine, OWN_INPUT)]
    if home.is_even:
        steps += _gather_phase(home, [[rank] for rank in home.rail], count())
        in_order = [hosts[host - turn] for turn in range(len(hosts))]
        brought = [[BufferSlice(Buffer.OUTPUT, ranks[owner]) for ranks in in_order] for owner in range(len(local))]
        return n, steps + ring.gather_phase(local, me, brought)
    steps += tree.gather_phase(local, me, [[rank] for rank in local], Buffer.OUTPUT)
    if me == 0:
        steps += _gather_phase(home, hosts, count())
    return n, steps + tree.broadcast_phase(local, me, BufferSlice(Buffer.OUTPUT, 0, n))


def _all_reduce_phase(home: HostPosition, blocks: Sequence[Sequence[int]]) -> list[Step]:
    """Returns the steps of the in-place exchange between hosts; the rail's rank on host i owns `blocks[i]`."""
    if len(home.hosts) == 2:
        return _swap_phase(home, [block for owned in blocks for block in owned])
    slots = count()

    def output(block: int) -> BufferSlice:
        return BufferSlice(Buffer.OUTPUT, block)

    return _reduce_phase(home, blocks, output, output, slots) + _gather_phase(home, blocks, slots)


def _swap_phase(home: HostPosition, blocks: Sequence[int]) -> list[Step]:
    """Returns the steps of the in-place exchange between two hosts; both add the second's blocks to the first's."""
    peer, n = home.rail[1 - home.host], len(blocks)
    of_hosts = [[BufferSlice(Buffer.WIRE, host * n + index) for index in range(n)] for host in range(2)]
    own, others = of_hosts[home.host], of_hosts[1 - home.host]
    floats = [BufferSlice(Buffer.OUTPUT, block) for block in blocks]
    steps: list[Step] = []
    for packed, output in zip(own, floats, strict=True):
        steps += (pack(packed, output), send(peer, packed))
    for theirs, first, second, output in zip(others, *of_hosts, floats, strict=True):
        steps += (receive(peer, theirs), unpack(output, first), add(output, second, final=True))
    return steps


def _reduce_phase(
    home: HostPosition, blocks: Sequence[Sequence[int]], held: _SliceOf, total: _SliceOf, slots: Iterator[int]
) -> list[Step]:
    """Returns the steps that send each block of `held` to its owner and add up this rank's blocks in `total`.

    At the start, `total` holds this host's contributions. The contributions of the other hosts are added in cyclic
    order, beginning with the next host.
    """
    rail, me, n = home.rail, home.host, len(home.hosts)
    steps: list[Step] = []
    for turn in range(1, n):
        target = (me + turn) % n
        for block in blocks[target]:
            packed = _slot(slots)
            steps += (pack(packed, held(block)), send(rail[target], packed))
    for turn in range(1, n):
        source = (me - turn) % n
        for block in blocks[me]:
            packed = _slot(slots)
            steps += (receive(rail[source], packed), add(total(block), packed, final=turn == n - 1))
    return steps


def _gather_phase(home: HostPosition, blocks: Sequence[Sequence[int]], slots: Iterator[int]) -> list[Step]:
    """Returns the steps in which each block's owner sends the rounded block of OUTPUT to all ranks on the rail."""
    rail, me, n = home.rail, home.host, len(home.hosts)
    steps: list[Step] = []
    for block in blocks[me]:
        packed, floats = _slot(slots), BufferSlice(Buffer.OUTPUT, block)
        steps += (pack(packed, floats), unpack(floats, packed))
        steps += (send(rail[(me + turn) % n], packed) for turn in range(1, n))
    for turn in range(1, n):
        source = (me - turn) % n
        for block in blocks[source]:
            packed = _slot(slots)
            steps += (receive(rail[source], packed), unpack(BufferSlice(Buffer.OUTPUT, block), packed))
    return steps


def _slot(slots: Iterator[int]) -> BufferSlice:
    return BufferSlice(Buffer.WIRE, next(slots))


OFFERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
}
