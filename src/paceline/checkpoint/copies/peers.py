"""Which vaults a rank writes its part into: that of its own host, and those of the next hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Presence:
    """Where a rank's launcher keeps copies.

    Attributes: `vault`, its identity; `host`, the same for all ranks of a machine; `address`, HOST:PORT for others.
    """

    vault: str
    host: str
    address: str


def targets(everyone: Sequence[Presence], rank: int, copies: int) -> list[Presence]:
    """Returns the vaults into which a rank writes, its own first.

    Hosts are in the order of their first ranks, and each has its copies on the ones that follow it, so that every host
    keeps about as much for others as others keep for it. There are fewer copies where there are fewer other hosts.

    >>> a, b, c = (Presence(f"v{host}", host, f"{host}:1") for host in "abc")
    >>> [each.host for each in targets([a, a, b, c], 1, 1)], [each.host for each in targets([a, a, b, c], 3, 2)]
    (['a', 'b'], ['c', 'a', 'b'])
    >>> [each.host for each in targets([a, a], 1, 1)]
    ['a']
    """
    firsts: dict[str, Presence] = {}
    for each in everyone:
        firsts.setdefault(each.host, each)
    hosts = list(firsts)
    own = hosts.index(everyone[rank].host)
    others = [hosts[(own + distance) % len(hosts)] for distance in range(1, min(copies, len(hosts) - 1) + 1)]
    return [everyone[rank], *(firsts[host] for host in others if firsts[host].address)]
