"""Finds out who the ranks are and whether they are still running, for engines whose library does not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from enum import Enum

from paceline.engine.api import EngineContext
from paceline.engine.failures import Member
from paceline.engine.introduction import introduce, read
from paceline.errors import RendezvousTimeoutError, StoreError
from paceline.store.base import Store
from paceline.wording import and_more

_MOST_NAMED = 4


class Fate(Enum):
    """How a rank ended; the store holds the value under the rank's key."""

    DIED = "died"
    LEFT = "left"


def exchange_members(context: EngineContext) -> tuple[Member, ...]:
    """Publishes this rank's host and process; returns those of all ranks, in rank order.

    Raises:
        RendezvousError: a rank gave up or died, or the ranks run different versions.
        RendezvousTimeoutError: a rank did not publish its host and process in time; the message names it.
    """
    keys = {f"members/{rank}": rank for rank in range(context.world_size)}
    context.store.set(f"members/{context.rank}", introduce())
    with context.forming("members") as formation:
        absent = formation.absent(list(keys), time.monotonic() + context.timeout_s)
    if absent:
        raise RendezvousTimeoutError(
            f"rank {context.rank}: waited {context.timeout_s:.0f} s for {context.world_size} ranks; "
            f"{and_more([keys[key] for key in absent], _MOST_NAMED)} did not arrive. Look at their output, or "
            "raise timeout="
        )
    return read(context.store.multi_get(list(keys)), context.rank)[0]


def announce_death(context: EngineContext) -> None:
    """Asks the store's server to tell the other ranks if this one dies.

    Ranks in other namespaces and on other hosts cannot see that themselves.
    """
    will = _key(context.rank), Fate.DIED.value
    if context.formation is not None and context.formation.is_open:
        context.formation.bequeath(*will)
    else:
        context.store.set_last_will(*will)


def announce_leave(context: EngineContext) -> None:
    """Tells the other ranks that this one has left, if the store is still there."""
    with contextlib.suppress(StoreError):
        context.store.set(_key(context.rank), Fate.LEFT.value)
        context.store.set_last_will("", "")


def fate_of(store: Store | None, member: Member) -> Fate | None:
    """Returns how a rank ended, or None if it is running or its fate is unknown.

    A rank whose fate is not in the store, or any rank if there is no store, counts as dead if its process has ended.

    Raises:
        StoreError: the store does not answer.
    """
    if store is not None and store.check([_key(member.rank)]):
        return Fate(store.get(_key(member.rank)).decode())
    return Fate.DIED if member.process is not None and member.process.has_ended() else None


def await_members(
    context: EngineContext, name: str, members: Sequence[Member], group_rank: int, timeout_s: float
) -> None:
    """Waits until all members of a group have opened it.

    An engine calls this before its library waits for them, because the library has no time-out or cannot name a missing
    rank.

    Args:
        context: the engine's context.
        name: identifies the group in the store.
        members: the group's members, by group rank.
        group_rank: the group rank of this process.
        timeout_s: how long to wait, in seconds.

    Raises:
        RendezvousError: a member gave up, died or left.
        RendezvousTimeoutError: a member did not open the group in time; the message names it.
    """
    store, others = context.store, [member for at, member in enumerate(members) if at != group_rank]
    keys = {f"{name}/here/{rank}": member for rank, member in enumerate(members)}
    store.set(list(keys)[group_rank], b"")
    with context.forming(name) as formation:
        formation.watch(lambda: next((each for each in others if fate_of(store, each)), None))
        absent = formation.absent(list(keys), time.monotonic() + timeout_s)
        if absent:
            raise RendezvousTimeoutError(
                f"{members[group_rank]}: {and_more([keys[key] for key in absent], _MOST_NAMED)} did not open this "
                "group "
                f"within {timeout_s:.0f} s. All ranks, members or not, call new_group with the same arguments and in "
                "the same order"
            )


def by_host(members: Sequence[Member]) -> list[list[int]]:
    """Returns the group ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for group_rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(group_rank)
    return list(hosts.values())


def _key(rank: int) -> str:
    return f"fate/{rank}"
