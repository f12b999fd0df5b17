"""Memory that all ranks of a group on one host share."""

from __future__ import annotations

import json

from paceline import _core
from paceline.descriptors import is_shortage, out_of_descriptors
from paceline.durations import to_seconds
from paceline.engine.native.engine import NativeGroup
from paceline.engine.native.host_memory import HostRanks
from paceline.group.process_group import ProcessGroup


def host_ranks(group: ProcessGroup) -> HostRanks | None:
    """Returns the ranks that share this rank's host, None if the group's engine does not connect them by memory."""
    opened = group.on_cpu
    return opened.host_ranks if isinstance(opened, NativeGroup) else None


def applies_updates(group: ProcessGroup) -> bool:
    """Returns whether `group.reduce_scatter_memory` can apply an update to its results."""
    opened = group.on_cpu
    return isinstance(opened, NativeGroup) and isinstance(opened.channel, _core.HostGroup)


def share_on_host(group: ProcessGroup, nbytes: int) -> _core.SharedMemory:
    """Returns memory of `nbytes` zeros that this rank shares with those of its host; every rank of `group` calls this.

    The group's engine must be one for which `host_ranks` returns the ranks.

    Raises:
        OutOfDescriptorsError, MemoryError: a rank has no descriptors or memory left; raised on every rank.
    """
    ranks = host_ranks(group)
    assert ranks is not None
    owner = ranks.here[0]
    memory, number = None, 0
    problem: Exception | None = None
    if owner == ranks.rank:
        try:
            memory, number = ranks.share(nbytes)
        except OSError as error:
            problem = _shortage(error, group, nbytes)
    numbers = _exchange(group, number, problem)
    if memory is None:
        try:
            memory = ranks.find(owner, numbers[owner], nbytes, to_seconds(group.timeout))
        except OSError as error:
            problem = _shortage(error, group, nbytes)
        if memory is None and problem is None:
            problem = MemoryError(f"{group.me}: the memory that rank {group.ranks[owner]} shares did not arrive")
    _exchange(group, 0, problem)
    if owner == ranks.rank:
        ranks.withdraw(number)
    assert memory is not None
    return memory


def _shortage(error: OSError, group: ProcessGroup, nbytes: int) -> Exception:
    if is_shortage(error):
        return out_of_descriptors(str(group.me), "memory that it shares with the other ranks of its host")
    return MemoryError(f"{group.me}: the system has no {nbytes:,} bytes of shared memory left ({error})")


def _exchange(group: ProcessGroup, number: int, problem: Exception | None) -> list[int]:
    """Returns every rank's number, unless a rank has a problem."""
    mine = json.dumps([number, str(problem) if problem else None]).encode()
    everyone = [json.loads(data) for data in group.all_gather_bytes(mine)]
    if problem is not None:
        raise problem
    for _, other in everyone:
        if other is not None:
            raise MemoryError(f"{group.me}: another rank cannot share memory, so no rank can: {other}")
    return [each for each, _ in everyone]
