"""The default process group, used by calls without a `group` argument, and functions that query groups and backends.

Only this module sets the default group. A `World` contains the default group and its store, engines and subgroups.
While the world created by `init_process_group` exists, Paceline is also torch.distributed's default backend for CPU
tensors, because torch functions that implicitly create torch's default group (`fully_shard`, `init_device_mesh`) would
otherwise silently choose gloo.
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

from paceline.comm.engine.api import choose, engines_for, missing_piece
from paceline.comm.engine.channel import ReduceOp, Reduction
from paceline.comm.group.engines import Engines
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.store.store import Store
from paceline.durations import to_nanoseconds

_OURS, _TORCHS = "paceline", "gloo"


def set_torch_default_backend() -> None:
    """Sets torch's default backend for CPU tensors to Paceline if the plug-in is registered and no backend was chosen.

    On a machine with a GPU, torch's default remains unchanged.
    """
    if not torch_dist.is_available() or torch.cuda.device_count():  # which, unlike `is_available`, asks only NVML
        return
    defaults = torch_dist.Backend.default_device_backend_map
    if _OURS in torch_dist.Backend.backend_list and defaults.get("cpu") == _TORCHS:
        defaults["cpu"] = _OURS
        logging.getLogger(__name__).info("torch.distributed uses the backend %r if a program specifies none", _OURS)


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
    """A default group with its store, engines and subgroups; `timeout_s` is the default timeout for subgroups."""

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
    """The world created by `init_process_group`; closed at process exit if it is still open."""

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
_inherited: tuple[int, int] | None = None  # the parent's rank and world size, in a process forked by a rank
_find_fallback: Callable[[], World | None] | None = None


def set_fallback_world(find: Callable[[], World | None]) -> None:
    """Makes calls use the world returned by `find` whenever `init_process_group` has not created one.

    `find` is invoked for each such call and may return None. The world's owner is responsible for closing it.
    """
    global _find_fallback
    _find_fallback = find


def set_default_world(world: OwnWorld) -> None:
    """Makes the group of `world` the default group."""
    global _world, _observed_size, _inherited
    _world, _observed_size, _inherited = world, None, None


def become_observer(size: int, why: str) -> None:
    """Makes `get_rank` and `get_world_size` report this process as the last of `size` + 1 ranks, until a world is set.

    The default group is closed, so a collective that this program calls after diverging from the other ranks fails with
    an error that contains the reason `why`.
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
    """Returns the world whose group is the default group; raises a ValueError if there is none."""
    world = find_world()
    if world is None and _inherited is not None:
        raise ValueError(
            f"this process was forked from rank {_inherited[0]}, and cannot use the groups of its parent, except in "
            "get_rank and get_world_size; make the call in the parent"
        )
    if world is None:
        raise ValueError(f"the default process group does not exist; call paceline.init_process_group() first{_hint()}")
    return world


def default_group() -> ProcessGroup:
    """Returns the default group; raises a ValueError if there is none."""
    return default_world().group


def given_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """Returns `group`, or the default group if it is None; raises a TypeError for groups of other libraries."""
    if group is None:
        return default_world().group
    if isinstance(group, ProcessGroup):
        return group
    raise TypeError(_wrong_group_text(group))


def resolve(group: Group, call: str = "") -> ProcessGroup | None:
    """Returns the group to use for a call, or None if this rank is not a member of `group`.

    If `call`, the name of a collective, is given, a rank that is not a member issues a warning that the collective has
    no effect.
    """
    if group is None:  # inlines `default_group`, which saves two function calls in every collective
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
        "one that torch.distributed.init_process_group('paceline') created)"
    )


def _wrong_group_text(group: object) -> str:
    world = find_world()
    me = "" if world is None else f"rank {world.group.me.rank}: "
    kind = f"{type(group).__module__}.{type(group).__qualname__}"
    wanted = "a group created by paceline.new_group, or None for the default group"
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        return f"{me}the process group is a {kind}; it must be {wanted}"
    return (
        f"{me}the process group belongs to torch.distributed ({kind}) and only works with its functions; Paceline's "
        f"functions need {wanted}. For a group of the same ranks call, on every rank, "
        "paceline.new_group(torch.distributed.get_process_group_ranks(group))"
    )


def forget_parent() -> bool:
    """Forgets the rank that forked this process; returns False if there is none."""
    global _inherited
    had_parent = _inherited_world() is not None
    _inherited = None
    return had_parent


def _inherited_world() -> tuple[int, int] | None:
    """Returns the parent's rank and world size if a rank forked this process, and this process has no group."""
    return _inherited if find_world() is None else None


def _forget_in_child() -> None:
    global _world, _inherited
    if _world is not None:
        _inherited = _world.group.rank(), _world.group.size()
    _world = None


atexit.register(leave)
os.register_at_fork(after_in_child=_forget_in_child)


def is_initialized() -> bool:
    """Returns True if the default process group exists, including in a process forked by a rank."""
    return find_world() is not None or _inherited is not None


def is_available() -> bool:
    """Returns True, because Paceline cannot be imported on a platform that it does not support."""
    return True


def get_rank(group: Group = None) -> int:
    """Returns this process's rank in `group`, or -1 if it is not a member.

    In a process forked by a rank, such as a DataLoader worker, the parent's rank is returned.
    """
    return _rank_and_size(group)[0]


def get_world_size(group: Group = None) -> int:
    """Returns the number of ranks in `group`, or -1 if this process is not a member.

    In a process forked by a rank, such as a DataLoader worker, the parent's world size is returned.
    """
    return _rank_and_size(group)[1]


def _rank_and_size(group: Group) -> tuple[int, int]:
    if group is None and _observed_size is not None:
        return _observed_size, _observed_size + 1
    if group is None and (inherited := _inherited_world()) is not None:
        return inherited
    resolved = resolve(group)
    return (-1, -1) if resolved is None else (resolved.rank(), resolved.size())


def get_backend(group: Group = None) -> str:
    """Returns the group's backend: the engine's name or, for several engines, a list like "cpu:paceline,cuda:nccl".

    Raises:
        ValueError: this rank is not in the group.
    """
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("get_backend: this rank is not in the group")
    return resolved.backend


def get_pg_count() -> int:
    """Returns the number of process groups created since `init_process_group`, including the default group."""
    world = own_world()
    return 0 if world is None else 1 + len(world.subgroups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Returns this process's rank among the ranks on its machine, from the environment variable LOCAL_RANK.

    Raises:
        ValueError: LOCAL_RANK is not set and there is no `fallback_rank`.
    """
    local_rank = os.environ.get("LOCAL_RANK", fallback_rank)
    if local_rank is None:
        raise ValueError("LOCAL_RANK is not set; start the script with `paceline run`, or pass fallback_rank=")
    return int(local_rank)


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Returns the ranks of the group's members in the default group, in the order of their group ranks."""
    resolved = resolve(group)
    return [] if resolved is None else list(resolved.ranks)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Converts a group rank in `group` to a rank in the default group.

    Raises:
        ValueError: the group has no such rank.
    """
    if not 0 <= group_rank < group.size():
        raise ValueError(f"group rank {group_rank} is not in {group}; it has ranks 0 to {group.size() - 1}")
    return group.ranks[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Converts a rank in the default group to a group rank in `group`.

    Raises:
        ValueError: the rank is not a member of the group.
    """
    return group.rank_map.group_rank_of(global_rank, "get_group_rank", "global_rank")


_BEST = {"cpu": "paceline", "cuda": "nccl"}


class Backend(str):
    """The name of a backend in lower case: `Backend("GLOO")` is "gloo".

    >>> Backend.PACELINE, Backend("GLOO")
    ('paceline', 'gloo')
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    PACELINE = "paceline"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"

    backend_list = (UNDEFINED, PACELINE, GLOO, MPI, NCCL)
    default_device_backend_map = _BEST

    def __new__(cls, name: str) -> Backend:
        """Converts the name to lower case."""
        if not isinstance(name, str):
            raise ValueError(f"Backend takes the name of a backend, not {name!r}")
        return super().__new__(cls, name.lower())


def is_backend_available(backend: str) -> bool:
    """Returns True if `backend`, such as "gloo" or "cpu:gloo,cuda:nccl", can be used on this machine."""
    try:
        chosen = choose(backend)
    except ValueError:
        return False
    return all(missing_piece(name) is None for name in chosen.engines.values())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Returns the backend for tensors on `device` in a program that does not specify a backend.

    Raises:
        ValueError: there is no backend for that device.
    """
    device_type = torch.device(device).type
    best = _BEST.get(device_type)
    if best is None or best not in engines_for(device_type):
        raise ValueError(f"no backend supports tensors on {device_type}; backends exist for {', '.join(_BEST)}")
    return best


def get_backend_config(group: Group = None) -> str:
    """Returns the group's backend for each type of device, such as "cpu:paceline,cuda:nccl".

    Raises:
        ValueError: this rank is not in the group.
    """
    chosen = choose(get_backend(group))
    return ",".join(f"{device_type}:{name}" for device_type, name in chosen.engines.items())


def is_nccl_available() -> bool:
    """Returns True if backend="nccl" can be used on this machine."""
    return missing_piece("nccl") is None


def is_mpi_available() -> bool:
    """Returns True if backend="mpi" can be used on this machine."""
    return missing_piece("mpi") is None


def is_gloo_available() -> bool:
    """Returns True if backend="gloo" can be used on this machine."""
    return missing_piece("gloo") is None


def is_ucc_available() -> bool:
    """Returns False, since Paceline has no engine for backend="ucc"."""
    return False


def is_xccl_available() -> bool:
    """Returns False, since Paceline has no engine for backend="xccl"."""
    return False


def is_torchelastic_launched() -> bool:
    """Returns True if `paceline run` or torchrun started this process; both set TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def supports_complex(op: Reduction) -> bool:
    """Returns True if complex tensors can be reduced by `op`."""
    return op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
