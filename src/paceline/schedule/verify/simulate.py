"""Simulates a run of a world's schedules under a cost model; tests hold each algorithm's `COSTS` against it.

Blocks move as in `symbolic.py`. A rank sends one block and receives one at a time, whichever could start first, of
several that of the earliest step; a host's network link carries one block each way at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.schedule.cost_model import PIPE_NBYTES, CostModel
from paceline.schedule.steps import Kind, Schedule, Slice
from paceline.schedule.verify.matching import Move, moves_by_link
from paceline.schedule.verify.meaning import CUT_LIKE_THE_TENSOR
from paceline.schedule.verify.memory import Memory


def simulate(
    schedules: Sequence[Schedule], model: CostModel, nbytes: int, hosts: Sequence[Sequence[int]] | None = None
) -> float:
    """Returns the seconds until the last block has arrived; `nbytes` is as for `cost.predict`. Not for a barrier."""
    pieces = -(-nbytes // (PIPE_NBYTES * schedules[0].blocks))
    if schedules[0].operation in CUT_LIKE_THE_TENSOR and pieces > 1:
        schedules = [_in_pieces(schedule, pieces) for schedule in schedules]
    return _Simulation(schedules, model, nbytes, hosts or [range(len(schedules))]).run()


def _in_pieces(schedule: Schedule, pieces: int) -> Schedule:
    """Cuts every block into pieces, which are passed on as they arrive."""

    def cut(blocks: Slice | None) -> Slice | None:
        return blocks and Slice(blocks.buffer, blocks.first * pieces, blocks.length * pieces)

    steps = tuple(step._replace(dst=cut(step.dst), src=cut(step.src)) for step in schedule.steps)
    return schedule._replace(blocks=schedule.blocks * pieces, steps=steps)


class _Wait(NamedTuple):
    """A step that cannot go on before its place has changed, or before a time."""

    step: int
    place: int | None
    until: float = 0


class _Simulation:
    def __init__(
        self, schedules: Sequence[Schedule], model: CostModel, nbytes: int, hosts: Sequence[Sequence[int]]
    ) -> None:
        self.schedules = schedules
        self.model = model
        self.block_nbytes = nbytes / schedules[0].blocks
        self.host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self.memory = Memory(schedules)
        self.settled = [0.0] * len(self.memory.values)  # when a place was last written
        self.released = [0.0] * len(self.memory.values)  # when a place was last read or written
        self.free: dict[tuple[str, int], float] = defaultdict(float)  # when a rank's or a host's port is free again
        self.events: list[tuple[float, int, int]] = []  # when, the step that goes on, its link
        self.waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.now = self.end = 0.0

    def run(self) -> float:
        """Runs links in the order in which they can go on; a link waits for a time, or for a place to change."""
        links = [self.link(moves) for moves in moves_by_link(self.schedules)]
        self.events = [(0.0, 0, number) for number in range(len(links))]
        while self.events:
            self.now, _, number = heappop(self.events)
            wait = next(links[number], None)
            if wait is None:
                continue
            if wait.place is None:
                heappush(self.events, (wait.until, wait.step, number))
            else:
                self.waiting[wait.place].append((wait.step, number))
        return self.end

    def link(self, moves: Sequence[Move]) -> Iterator[_Wait]:
        """Moves block after block, as soon as places and ports allow."""
        written, accessed = self.memory.written, self.memory.accessed
        for source, source_step, target, target_step in moves:
            reads, _ = self.memory.accesses[source][source_step]
            own_reads, writes = self.memory.accesses[target][target_step]
            kind = self.schedules[target].steps[target_step].kind
            apart = kind is Kind.REDUCE and bool(own_reads)
            for at, ((src, src_before), (own, own_before), (dst, dst_before)) in enumerate(
                zip(reads, own_reads if apart else writes, writes, strict=True)
            ):
                while written[src] != src_before:
                    yield _Wait(source_step, src)
                while apart and written[own] != own_before:
                    yield _Wait(source_step, own)
                while accessed[dst] != dst_before:
                    yield _Wait(source_step, dst)
                ready = max(self.settled[src], self.settled[own] if apart else 0, self.released[dst])
                while (start := max(ready, self.port_free(source, target))) > self.now:
                    yield _Wait(source_step, None, start)
                end = self.occupy(source, target, first=at == 0, reducing=kind is Kind.REDUCE)
                self.settled[dst] = end
                written[dst] += 1
                for place in (src, own, dst) if apart else (src, dst):
                    accessed[place] += 1
                    self.released[place] = max(self.released[place], end)
                    for waiter in self.waiting.pop(place, ()):
                        heappush(self.events, (self.now, *waiter))

    def port_free(self, source: int, target: int) -> float:
        """Returns when a block may leave source for target."""
        return max((self.free[port] for port in self.ports(source, target)), default=0.0)

    def occupy(self, source: int, target: int, *, first: bool, reducing: bool) -> float:
        """Starts to move a block now; returns when it will have arrived."""
        if source == target:
            return self.now
        near = self.host_of[source] == self.host_of[target]
        link = self.model.within_host if near else self.model.between_hosts
        moved = self.now + self.block_nbytes * link.beta_s_per_byte
        arrived = moved + link.alpha_s * first + self.block_nbytes * self.model.gamma_s_per_byte * reducing
        for port in self.ports(source, target):
            self.free[port] = arrived if "rank" in port[0] else moved
        self.end = max(self.end, arrived)
        return arrived

    def ports(self, source: int, target: int) -> list[tuple[str, int]]:
        """Returns what a message keeps busy: two ranks, and two hosts' network links if it leaves the host."""
        if source == target:
            return []
        ranks = [("rank out", source), ("rank in", target)]
        hosts = self.host_of[source], self.host_of[target]
        return ranks if hosts[0] == hosts[1] else [*ranks, ("host out", hosts[0]), ("host in", hosts[1])]
