"""Who the ranks are and whether they are still there, for engines that do not find out themselves."""

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


class Fate(Enum):
    """How a rank ended; the value is what the store has under the rank's key."""

    DIED = "died"
    LEFT = "left"


def exchange_members(context: EngineContext) -> tuple[Member, ...]:
    """Publishes this rank's host and process and reads the others'.

    Raises:
        RendezvousError: a rank gave up or died, or the ranks run different versions.
        RendezvousTimeoutError: a rank did not publish its own; the message names it.
    """
    keys = {f"members/{rank}": rank for rank in range(context.world_size)}
    context.store.set(f"members/{context.rank}", introduce())
    with context.forming("members") as formation:
        absent = formation.absent(list(keys), time.monotonic() + context.timeout_s)
    if absent:
        raise RendezvousTimeoutError(
            f"rank {context.rank}: waited {context.timeout_s:.0f} s for {context.world_size} ranks; "
            f"{', '.join(str(keys[key]) for key in absent)} did not arrive. Look at their output, or raise timeout="
        )
    return read(context.store.multi_get(list(keys)), context.rank)[0]


def announce_death(context: EngineContext) -> None:
    """Has the store's server tell the others if this rank dies: those in other namespaces and on other hosts do not see
    it themselves.
    """
    will = _key(context.rank), Fate.DIED.value
    if context.formation is not None and context.formation.is_open:
        context.formation.bequeath(*will)
    else:
        context.store.set_last_will(*will)


def announce_leave(context: EngineContext) -> None:
    """Tells the others that this rank has left; as far as the store still is there."""
    with contextlib.suppress(StoreError):
        context.store.set(_key(context.rank), Fate.LEFT.value)
        context.store.set_last_will("", "")


def fate_of(store: Store | None, member: Member) -> Fate | None:
    """How a rank ended, None if it runs or nobody knows; without a store, one whose process has ended counts as dead.

    Raises:
        StoreError: the store does not answer.
    """
    if store is not None and store.check([_key(member.rank)]):
        return Fate(store.get(_key(member.rank)).decode())
    return Fate.DIED if member.process is not None and member.process.has_ended() else None


def await_members(
    context: EngineContext, name: str, members: Sequence[Member], group_rank: int, timeout_s: float
) -> None:
    """Waits until all of a group's members have come, before a library does that has no time-out or names nobody.

    Args:
        name: of the group, in the store.

    Raises:
        RendezvousError: a member gave up, died or left.
        RendezvousTimeoutError: a member did not come; the message names it.
    """
    store, others = context.store, [member for at, member in enumerate(members) if at != group_rank]
    keys = {f"{name}/here/{rank}": member for rank, member in enumerate(members)}
    store.set(list(keys)[group_rank], b"")
    with context.forming(name) as formation:
        formation.watch(lambda: next((each for each in others if fate_of(store, each)), None))
        absent = formation.absent(list(keys), time.monotonic() + timeout_s)
        if absent:
            raise RendezvousTimeoutError(
                f"{members[group_rank]}: {', '.join(str(keys[key]) for key in absent)} did not open this group within "
                f"{timeout_s:.0f} s. All ranks, members or not, call new_group with the same arguments and in the same "
                "order"
            )


def by_host(members: Sequence[Member]) -> list[list[int]]:
    """Group ranks by host."""
    hosts: dict[str, list[int]] = {}
    for group_rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(group_rank)
    return list(hosts.values())


def _key(rank: int) -> str:
    return f"fate/{rank}"
