"""Where a rank is: its host, and its place among the ranks of that host and of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.schedule.steps import Place, rotated

Hosts = Sequence[Sequence[int]]


class Home(NamedTuple):
    """The hosts, and where this rank is: it is local[me], where `local` are the ranks of hosts[host]."""

    hosts: Hosts
    host: int
    local: Sequence[int]
    me: int

    @property
    def is_even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def rail(self) -> list[int]:
        """The ranks at this rank's place on all hosts. For a leader these are the leaders."""
        return [host[self.me] for host in self.hosts]


def find_home(at: Place) -> Home:
    """Finds this rank's host. If there is a root, its host comes first, and the root comes first on that host.

    Raises:
        ValueError: the hosts do not list each rank once.
    """
    if sorted(rank for host in at.hosts for rank in host) != list(range(at.world_size)) or not all(at.hosts):
        raise ValueError(
            f"the algorithm needs hosts that list each of the {at.world_size} ranks once, and none empty; got "
            f"{at.hosts}"
        )
    hosts = at.hosts
    if at.root >= 0:
        first = next(number for number, host in enumerate(hosts) if at.root in host)
        hosts = [rotated(hosts[first], at.root), *hosts[first + 1 :], *hosts[:first]]
    number = next(number for number, host in enumerate(hosts) if at.rank in host)
    return Home(hosts, number, hosts[number], hosts[number].index(at.rank))
