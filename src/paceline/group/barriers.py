"""Barriers: calls that return when every rank has made them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.durations import Timeout
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.work import Work


@eager
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Waits until every rank of the group has called it. It does not wait for kernels on a GPU.

    Args:
        group: the default group if None.
        async_op: return a `Work` at once.
        device_ids: must be None; a barrier uses no device.
        timeout: how long to wait, as a timedelta or in seconds; the group's if None.

    Raises:
        ValueError: `device_ids` is given.
    """
    if device_ids is not None:
        raise ValueError(f"barrier: device_ids is {device_ids}; a barrier uses no device here, leave device_ids out")
    chosen = resolve(group)
    return None if chosen is None else chosen.barrier(async_op, timeout)


@eager
def monitored_barrier(group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Waits until every rank of the group has called it, and names those that have not within `timeout`.

    All ranks that wait get the error, not only rank 0 as in torch.distributed, where the others only learn that the
    barrier failed. Every call of Paceline names the ranks that are missing; the message of this one begins with them.

    Args:
        group: the default group if None.
        timeout: how long to wait, as a timedelta or in seconds; the group's if None.
        wait_all_ranks: name all missing ranks; otherwise the first, and how many more there are.

    Raises:
        CollectiveTimeoutError: ranks are missing; its `missing` lists them all. The group can no longer be used.
        PeerLostError: a rank died or left. The group can no longer be used.
    """
    chosen = resolve(group)
    if chosen is not None:
        chosen.monitored_barrier(timeout, wait_all_ranks)
