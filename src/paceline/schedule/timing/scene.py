"""Lays out what the core simulates: programs, the routes between them, and links.

On a uniform network, and if all ranks arrive at the same time and are equally fast, the first host stands for all if
the schedules are alike on all hosts (`ALIKE` of their algorithm): turning the hosts turns schedules and network into
themselves, and what is decided by nothing but these is then the same on all hosts. This is exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.schedule.flat import flatten
from paceline.schedule.network import Network
from paceline.schedule.registry import wire_of
from paceline.schedule.steps import Kind, Schedule
from paceline.schedule.timing.crossing import Way, cross


@dataclass
class Scene:
    """What the core simulates. A program is for the rank of the same number, and for those that it stands for.

    `routes` are in the form of `_core.simulate`; `pairs` are the ranks of each, `ways` the links by their numbers.
    """

    network: Network
    standing: Callable[[int], int]  # the rank whose program stands for a rank
    turned: Callable[[int, int], int]  # (rank, by): what `rank` is if the rank `by` is turned to the one for it
    blocks: int = 0
    schedules: list[_core.Schedule] = field(default_factory=list)
    speeds: Sequence[float] = ()
    routes: array[float] = field(default_factory=lambda: array("d"))
    pairs: list[tuple[int, int]] = field(default_factory=list)
    ways: dict[Way, int] = field(default_factory=dict)
    capacities: array[float] = field(default_factory=lambda: array("d"))

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Adds the programs in the order of their ranks."""
        for schedule in schedules:
            self.blocks = schedule.blocks
            self.schedules.append(_to_core(schedule))
            for peer in dict.fromkeys(step.peer for step in schedule.steps if step.kind is Kind.SEND):
                self._add_route(schedule.rank, peer)

    def _add_route(self, source: int, target: int) -> None:
        crossing = cross(self.network, source, target)
        self.pairs.append((source, target))
        numbers = (source, target, self.standing(target), self.turned(source, target))
        self.routes.extend((*numbers, crossing.latency_s, crossing.overhead_s, crossing.most, len(crossing.ways)))
        for way, bytes_per_s in crossing.ways:
            self.routes.extend((self._number_of(way, bytes_per_s), crossing.weight))

    def _number_of(self, way: Way, bytes_per_s: float) -> int:
        way = self.stands_for(way)
        if way not in self.ways:
            self.ways[way] = len(self.ways)
            speed = self.speeds[way.number] if way.kind == "rank" and self.speeds else 1.0
            self.capacities.append(bytes_per_s * speed)
        return self.ways[way]

    def stands_for(self, way: Way) -> Way:
        """Returns the way that is simulated for a way."""
        if way.kind == "rank":
            return Way("rank", self.standing(way.number), way.direction)
        if way.kind == "host":
            host = self.network.host_of[self.standing(self.network.hosts[way.number][0])]
            return Way("host", host, way.direction)
        return way


def whole_scene(network: Network, speeds: Sequence[float]) -> Scene:
    """Returns a scene in which every rank stands for itself."""
    return Scene(network, lambda rank: rank, lambda rank, _: rank, speeds=speeds)


def folded_scene(network: Network) -> Scene:
    """Returns a scene in which the ranks of the first host stand for those in the same place on others."""
    per_host, world_size = len(network.hosts[0]), network.world_size

    def turned(rank: int, by: int) -> int:
        return (rank - (by - by % per_host)) % world_size

    return Scene(network, lambda rank: rank % per_host, turned)


def _to_core(schedule: Schedule) -> _core.Schedule:
    at = schedule.blocks, schedule.rank, schedule.world_size
    return _core.Schedule.make(0, *at, flatten(schedule), wire_of(schedule.algorithm))
