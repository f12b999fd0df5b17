"""The default process group, which calls without a `group` argument use. Only this module sets it.

A `World` contains the default group with its store, engines and subgroups. While the world created by
`init_process_group` exists, Paceline is also torch.distributed's default backend for CPU tensors, because torch
functions that implicitly create torch's default group (`fully_shard`, `init_device_mesh`) would silently choose gloo.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Callable
from multiprocessing import util

import torch
import torch.distributed as torch_dist

from paceline.comm.group.engines import Engines
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.store.store import Store
from paceline.durations import to_nanoseconds

_OURS, _TORCHS = "paceline", "gloo"


def set_torch_default_backend() -> None:
    """Makes Paceline torch's default backend for CPU tensors, if the plug-in is registered and no backend was chosen.

    On a machine with a GPU, torch's default remains unchanged.
    """
    if not torch_dist.is_available() or torch.cuda.is_available():
        return
    defaults = torch_dist.Backend.default_device_backend_map
    if _OURS in torch_dist.Backend.backend_list and defaults.get("cpu") == _TORCHS:
        defaults["cpu"] = _OURS
        logging.getLogger(__name__).info("torch.distributed takes the backend %r where a program names none", _OURS)


def restore_torch_default_backend() -> None:
    """Undoes `set_torch_default_backend`; idempotent."""
    if torch_dist.is_available() and torch_dist.Backend.default_device_backend_map.get("cpu") == _OURS:
        torch_dist.Backend.default_device_backend_map["cpu"] = _TORCHS


class NonMember:
    """The type of `GroupMember.NON_GROUP_MEMBER`."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _GroupMemberType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """Returns the default group, or None before `init_process_group`."""
        world = find_world()
        return None if world is None else world.group


class GroupMember(metaclass=_GroupMemberType):
    """Namespace for `WORLD`, the default group, and `NON_GROUP_MEMBER`, which represents groups without this rank."""

    NON_GROUP_MEMBER = NonMember()


Group = ProcessGroup | NonMember | None


class World:
    """A default group with its store, engines and subgroups.

    Args:
        store: the store of the rendezvous.
        engines: the engines of `group` and its subgroups.
        group: the group of all ranks.
        timeout_s: the default timeout of subgroups, in seconds.
    """

    def __init__(self, store: Store, engines: Engines, group: ProcessGroup, timeout_s: float) -> None:
        self.store = store
        self.engines = engines
        self.group = group
        self.timeout_s = timeout_s
        self.subgroups: list[ProcessGroup] = []

    def close_subgroups(self) -> None:
        """Destroys all subgroups; idempotent."""
        for subgroup in self.subgroups:
            subgroup.close()
        self.subgroups.clear()

    def close(self) -> None:
        """Destroys all groups on this rank; idempotent."""
        self.close_subgroups()
        self.group.close()
        self.engines.close()


class OwnWorld(World):
    """The world created by `init_process_group`; it is closed at process exit at the latest."""

    def __init__(self, store: Store, owns_store: bool, engines: Engines, group: ProcessGroup, timeout_s: float) -> None:
        super().__init__(store, engines, group, timeout_s)
        self._owns_store = owns_store
        # Processes started by multiprocessing do not run functions registered with atexit.
        self._leaving = util.Finalize(None, leave, exitpriority=0)
        set_torch_default_backend()

    def close(self) -> None:
        """Destroys all groups on this rank, and closes the store if Paceline opened it."""
        restore_torch_default_backend()
        self._leaving.cancel()
        super().close()
        if self._owns_store:
            self.store.close()


_world: OwnWorld | None = None
_observed_size: int | None = None
_find_fallback: Callable[[], World | None] | None = None


def set_fallback_world(find: Callable[[], World | None]) -> None:
    """Makes calls use the world returned by `find` whenever `init_process_group` has not created one.

    `find` is invoked for each such call and may return None. The world's owner is responsible for closing it.
    """
    global _find_fallback
    _find_fallback = find


def set_default_world(world: OwnWorld) -> None:
    """Makes the group of `world` the default group."""
    global _world, _observed_size
    _world, _observed_size = world, None


def become_observer(size: int, why: str) -> None:
    """Makes `get_rank` and `get_world_size` report this process as the last of `size` + 1 ranks, until a world is set.

    The default group is closed, so collectives fail if this program has diverged from the other ranks; the error
    contains the reason `why`.
    """
    global _observed_size
    if _observed_size is None:
        default_group().close_with_reason(why)
    _observed_size = size


def observed_world_size() -> int | None:
    """Returns the number of ranks that this process observes, or None if this process is a rank."""
    return _observed_size


def leave() -> None:
    """Closes the world passed to `set_default_world`, if there is one."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()


def own_world() -> OwnWorld | None:
    """Returns the world created by `init_process_group`, or None if there is none."""
    return _world


def default_world() -> World:
    """Returns the world whose group is the default group.

    Raises:
        ValueError: there is no default group.
    """
    world = find_world()
    if world is None:
        raise ValueError(f"the default process group does not exist; call paceline.init_process_group() first{_hint()}")
    return world


def default_group() -> ProcessGroup:
    """Returns the default group.

    Raises:
        ValueError: there is no default group.
    """
    return default_world().group


def given_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """Returns `group`, or the default group if it is None.

    Raises:
        TypeError: `group` is not a Paceline group.
        ValueError: there is no default group.
    """
    if group is None:
        return default_world().group
    if isinstance(group, ProcessGroup):
        return group
    raise TypeError(_wrong_group_text(group))


def resolve(group: Group, call: str = "") -> ProcessGroup | None:
    """Returns the group to use for a call, or None if this rank is not a member.

    Args:
        group: the group, or None for the default group.
        call: the name of the collective, for a warning if this rank is not a member and the collective therefore has no
            effect; "" for no warning.

    Raises:
        TypeError: `group` is not a Paceline group.
        ValueError: `group` is None, and there is no default group.
    """
    if group is None:  # inlines `default_group`, to save every collective two function calls
        return default_world().group if _world is None else _world.group
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonMember):
        if call:
            warnings.warn(
                f"rank {default_world().group.rank()}: {call} does nothing, because this rank is not in the group that "
                "was passed to it. Call it only on the group's ranks, or pass another group",
                stacklevel=3,
            )
        return None
    raise TypeError(_wrong_group_text(group))


def raise_timeouts(least_s: float) -> None:
    """Increases the timeout of every group to at least `least_s` seconds."""
    world = default_world()
    for group in (world.group, *world.subgroups):
        group.timeout_ns = max(group.timeout_ns, to_nanoseconds(least_s))


def find_world() -> World | None:
    """Returns the world whose group is the default group, or None if there is no default group."""
    if _world is not None:
        return _world
    return None if _find_fallback is None else _find_fallback()


def _hint() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return (
        f" (torch.distributed's default group has the backend {torch.distributed.get_backend()!r}; Paceline would use "
        "one that torch.distributed.init_process_group('paceline') made)"
    )


def _wrong_group_text(group: object) -> str:
    world = find_world()
    me = "" if world is None else f"rank {world.group.me.rank}: "
    kind = f"{type(group).__module__}.{type(group).__qualname__}"
    wanted = "a group that paceline.new_group made, or None for the default group"
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        return f"{me}the process group is a {kind}; it must be {wanted}"
    return (
        f"{me}the process group is one of torch.distributed ({kind}), whose calls are those of torch.distributed; "
        f"Paceline's take {wanted}. For a group of the same ranks call, on every rank, "
        "paceline.new_group(torch.distributed.get_process_group_ranks(group))"
    )


def _forget_in_child() -> None:
    global _world
    _world = None


atexit.register(leave)
os.register_at_fork(after_in_child=_forget_in_child)
