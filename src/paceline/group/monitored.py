"""A barrier that says who did not come."""

from __future__ import annotations

from datetime import timedelta

from paceline.durations import to_seconds
from paceline.errors import CollectiveTimeoutError
from paceline.group.default import Group, resolve


def monitored_barrier(group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
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
    if chosen is None:
        return
    try:
        chosen.barrier(timeout=timeout)
    except CollectiveTimeoutError as error:
        missing = error.missing
        if not missing:
            raise
        waited_s = to_seconds(chosen.timeout if timeout is None else timeout)
        named = f"ranks {list(missing)}" if wait_all_ranks and len(missing) > 1 else f"rank {missing[0]}"
        if not wait_all_ranks and len(missing) > 1:
            named += f" and {len(missing) - 1} more (wait_all_ranks=True names them)"
        told = CollectiveTimeoutError(f"monitored_barrier: {named} did not come within {waited_s:g} s. {error}")
        told.missing = missing
        raise told from None
