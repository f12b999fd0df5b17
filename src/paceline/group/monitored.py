"""A barrier that says who did not come."""

from __future__ import annotations

from paceline.durations import Timeout
from paceline.group.default import Group, resolve


def monitored_barrier(group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Returns when every rank of the group has called it; names those that have not when `timeout` is over.

    All ranks that wait get the error, not only rank 0 as in torch.distributed, where others learn only that the
    barrier failed. (Every call of Paceline names the ranks that are missing; this one says nothing else.)

    Args:
        group: the default group if None.
        timeout: how long to wait; the group's if None.
        wait_all_ranks: name all missing ranks; otherwise the first, and how many more there are.

    Raises:
        CollectiveTimeoutError: ranks are missing; its `missing` has them all. The group is broken.
        PeerLostError: a rank died or left. The group is broken.
    """
    chosen = resolve(group)
    if chosen is not None:
        chosen.monitored_barrier(timeout, wait_all_ranks)
