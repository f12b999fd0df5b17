"""The groups over which gradients are summed: the ranks of a host, and those that own the same slices on all hosts."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.engine.native.host_memory import HostRanks
from paceline.group.default import NonMember
from paceline.group.host_memory import host_ranks
from paceline.group.process_group import ProcessGroup
from paceline.group.subgroups import split_group


@dataclass(frozen=True)
class HostGroups:
    """The groups of a rank.

    Attributes:
        whole: all ranks.
        host: those of this host.
        across: one of each host, which own the same slices; None if there is one host.
        ranks: those of this host, by which they share memory.
        is_first: whether this is the host of the whole group's first rank.
    """

    whole: ProcessGroup
    host: ProcessGroup
    across: ProcessGroup | None
    ranks: HostRanks
    is_first: bool


def groups_by_host(group: ProcessGroup) -> HostGroups:
    """Divides the ranks of `group` by their hosts; every rank calls this.

    Raises:
        ValueError: the group's engine does not connect the ranks of a host by shared memory, or the hosts have
            different numbers of ranks; raised on every rank.
    """
    ranks = host_ranks(group)
    if ranks is None:
        raise ValueError(
            f"{group.me}: the group's backend is {group.backend!r}, which gives ranks no memory that they share; a "
            "SharedModelOptimizer needs the engine 'paceline'"
        )
    everyone = {tuple(json.loads(data)) for data in group.all_gather_bytes(json.dumps(ranks.here).encode())}
    hosts = [list(here) for here in sorted(everyone)]
    if len(hosts) == 1:
        return HostGroups(group, group, None, ranks, True)
    sizes = [len(here) for here in hosts]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{group.me}: the hosts have {sizes} ranks; the slices that a rank owns must be the same on every host, so "
            "a SharedModelOptimizer needs hosts with the same number of ranks"
        )
    host = split_group(group, hosts, group_desc="ranks of this host, which share a model")
    across = split_group(group, [list(each) for each in zip(*hosts, strict=True)], group_desc="owners of a slice")
    assert not isinstance(host, NonMember)
    assert not isinstance(across, NonMember)
    return HostGroups(group, host, across, ranks, ranks.here == hosts[0])
