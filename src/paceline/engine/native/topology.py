"""Which ranks a job has, and on which hosts they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.failures import Member


@dataclass(frozen=True)
class Topology:
    """The ranks and where they run: `members[r]` is rank r of the default group; `hosts` lists each host's ranks."""

    rank: int
    members: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    nonce: str  # identifies this rendezvous; it is the same on all ranks

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, in the order in which the mesh numbers them."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    def hosts_of(self, ranks: Sequence[int]) -> list[list[int]]:
        """Returns the group ranks on each host that has some, for the group that consists of `ranks`."""
        host_of = {rank: number for number, host in enumerate(self.hosts) for rank in host}
        found: dict[int, list[int]] = {}
        for group_rank, rank in enumerate(ranks):
            found.setdefault(host_of[rank], []).append(group_rank)
        return [found[number] for number in sorted(found)]
