"""The default process group: which one it is, and what calls without a group of their own use.

`init.py` makes and ends groups; `queries.py` answers a program's questions about them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import util

import torch

from paceline.group.engines import Engines
from paceline.group.process_group import ProcessGroup
from paceline.group.torch_backend import offer, withdraw
from paceline.store.base import Store


class NonMember:
    """What `new_group` returns to a rank that is not in the group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _GroupMemberType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, None before `init_process_group`."""
        world = find_world()
        return None if world is None else world.group


class GroupMember(metaclass=_GroupMemberType):
    """`GroupMember.WORLD` is the default group, `GroupMember.NON_GROUP_MEMBER` stands for one this rank is not in."""

    NON_GROUP_MEMBER = NonMember()


Group = ProcessGroup | NonMember | None


class World:
    """A default group with all that belongs to it.

    Args:
        store: where the ranks met.
        engines: what `group` and its sub-groups are made with.
        group: of all ranks.
        timeout: for groups that are given none.
    """

    def __init__(self, store: Store, engines: Engines, group: ProcessGroup, timeout: timedelta) -> None:
        self.store = store
        self.engines = engines
        self.group = group
        self.timeout = timeout
        self.subgroups: list[ProcessGroup] = []

    def close_subgroups(self) -> None:
        """Ends all groups that were made of the ranks of `group`; idempotent."""
        for each in self.subgroups:
            each.close()
        self.subgroups.clear()

    def close(self) -> None:
        """Ends all groups for this rank; idempotent."""
        self.close_subgroups()
        self.group.close()
        self.engines.close()


class OwnWorld(World):
    """A world that `init_process_group` made, and that ends with the process at the latest."""

    def __init__(
        self, store: Store, owns_store: bool, engines: Engines, group: ProcessGroup, timeout: timedelta
    ) -> None:
        super().__init__(store, engines, group, timeout)
        self._owns_store = owns_store
        # Processes of multiprocessing end without running what atexit knows.
        self._leaving = util.Finalize(None, leave, exitpriority=0)
        offer()

    def close(self) -> None:
        """Ends all groups for this rank, and the store if Paceline opened it."""
        withdraw()
        self._leaving.cancel()
        super().close()
        if self._owns_store:
            self.store.close()


_world: OwnWorld | None = None
_borrow: Callable[[], World | None] | None = None


def borrow_world(find: Callable[[], World | None]) -> None:
    """Has calls use the default group of the world that `find` returns for as long as `init_process_group` made none.

    Whoever made that world ends it. `find` is asked at each call, and returns None when there is none.
    """
    global _borrow
    _borrow = find


def adopt(world: OwnWorld) -> None:
    """Makes the group of `world` the default group."""
    global _world
    _world = world


def leave() -> None:
    """Ends all groups of the world that `adopt` was given; without one, does nothing."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()


def own_world() -> OwnWorld | None:
    """Returns the world that `init_process_group` made, None before it and after its end."""
    return _world


def default_world() -> World:
    """The default group with what it is made of.

    Raises:
        ValueError: there is none.
    """
    world = find_world()
    if world is None:
        raise ValueError(f"the default process group does not exist; call paceline.init_process_group() first{_hint()}")
    return world


def default_group() -> ProcessGroup:
    """The default group.

    Raises:
        ValueError: there is none.
    """
    return default_world().group


def resolve(group: Group) -> ProcessGroup | None:
    """The group a call is for; None when this rank is not in it."""
    if group is None:
        return default_world().group
    return None if isinstance(group, NonMember) else group


def raise_timeouts(least: timedelta) -> None:
    """Gives every group a time-out of at least `least`."""
    world = default_world()
    for group in (world.group, *world.subgroups):
        group.set_timeout(max(group.timeout, least))


def find_world() -> World | None:
    """Returns the world whose group is the default group now, None without one."""
    if _world is not None:
        return _world
    return None if _borrow is None else _borrow()


def _hint() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return (
        f" (torch.distributed's default group has the backend {torch.distributed.get_backend()!r}; Paceline would use "
        "one that torch.distributed.init_process_group('paceline') made)"
    )


def _forget_in_child() -> None:
    global _world
    _world = None


atexit.register(leave)
os.register_at_fork(after_in_child=_forget_in_child)
