"""Who the ranks are, for engines that do not find out themselves."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from paceline.engine.failures import Member
from paceline.errors import RendezvousTimeoutError, StoreTimeoutError
from paceline.store.base import Store


def exchange_members(store: Store, rank: int, world_size: int, timeout_s: float) -> tuple[Member, ...]:
    """Publishes this rank's host and process and reads the others'.

    Raises:
        RendezvousTimeoutError: a rank did not publish its own; the message names it.
    """
    keys = [f"members/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps([socket.gethostname(), os.getpid()]))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except StoreTimeoutError as error:
        absent = [str(each) for each, key in enumerate(keys) if not store.check([key])]
        raise RendezvousTimeoutError(
            f"rank {rank}: waited {timeout_s:.0f} s for {world_size} ranks; {', '.join(absent)} did not arrive. "
            "Look at their output, or raise timeout="
        ) from error
    return tuple(Member(each, *json.loads(entry)) for each, entry in enumerate(store.multi_get(keys)))


def await_members(store: Store, name: str, members: Sequence[Member], group_rank: int, timeout_s: float) -> None:
    """Waits until all of a group's members have come, before a library does that has no time-out or names nobody.

    Args:
        name: of the group, in the store.

    Raises:
        RendezvousTimeoutError: a member did not come; the message names it.
    """
    keys = [f"{name}/here/{rank}" for rank in range(len(members))]
    store.set(keys[group_rank], b"")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except StoreTimeoutError as error:
        absent = [str(member) for key, member in zip(keys, members, strict=True) if not store.check([key])]
        raise RendezvousTimeoutError(
            f"{members[group_rank]}: {', '.join(absent)} did not open this group within {timeout_s:.0f} s. All ranks, "
            "members or not, call new_group with the same arguments and in the same order"
        ) from error


def by_host(members: Sequence[Member]) -> list[list[int]]:
    """Group ranks by host."""
    hosts: dict[str, list[int]] = {}
    for group_rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(group_rank)
    return list(hosts.values())
