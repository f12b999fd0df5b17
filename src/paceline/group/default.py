"""The default process group, and everything that makes and ends groups."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import util

import torch

from paceline.descriptors import is_shortage, out_of_descriptors
from paceline.durations import Timeout, to_seconds, to_timedelta
from paceline.engine.api import Meeting
from paceline.engine.formation import Formation
from paceline.engine.registry import Backend, choose, meeting
from paceline.group import torch_backend
from paceline.group.arguments import group_rank_of
from paceline.group.engines import Engines
from paceline.group.process_group import ProcessGroup
from paceline.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.store.base import Store

DEFAULT_TIMEOUT = default_pg_timeout = timedelta(minutes=30)  # the second name is torch's


class NonMember:
    """What `new_group` returns to a rank that is not in the group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _GroupMemberType(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, None before `init_process_group`."""
        world = _find_world()
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


class _OwnWorld(World):
    """One that `init_process_group` made."""

    def __init__(
        self, store: Store, owns_store: bool, engines: Engines, group: ProcessGroup, timeout: timedelta
    ) -> None:
        super().__init__(store, engines, group, timeout)
        self._owns_store = owns_store
        # Processes of multiprocessing end without running what atexit knows.
        self._leaving = util.Finalize(None, _leave_at_exit, exitpriority=0)
        torch_backend.offer()

    def close(self) -> None:
        torch_backend.withdraw()
        self._leaving.cancel()
        super().close()
        if self._owns_store:
            self.store.close()


_world: _OwnWorld | None = None
_borrow: Callable[[], World | None] | None = None


def borrow_world(find: Callable[[], World | None]) -> None:
    """Has calls use the default group of the world that `find` returns for as long as `init_process_group` made none.

    Whoever made that world ends it. `find` is asked at each call, and returns None when there is none.
    """
    global _borrow
    _borrow = find


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: None = None,
    device_id: torch.device | int | None = None,
    *,
    interface: str | None = None,
    algorithm: str | None = None,
    between_hosts: str | None = None,
) -> None:
    """Makes the default process group; every rank calls this once, and it returns when all have come.

    Without this call the default group of torch.distributed is used, if its backend is "paceline". While the group
    exists, torch.distributed takes Paceline for CPU tensors where a program names no backend, as `fully_shard` does.

    Args:
        backend: the engine: "paceline", "gloo" or "mpi" for CPU tensors, "nccl" for CUDA tensors, or one for each like
            "cpu:gloo,cuda:nccl"; by default the best that is there for each. CPU tensors go by "paceline" if no other
            is named for them.
        init_method: "env://" (the default), "tcp://host:port" or "file:///path"; see `rendezvous`. With "mpi" the ranks
            that mpirun started need none.
        timeout: how long to wait for the other ranks, here and in every later call, as a timedelta or in seconds; 30
            minutes by default.
        world_size, rank: the number of ranks and this one's; from the environment with env://.
        store: a store that all ranks share, instead of `init_method`; needs `world_size` and `rank`.
        group_name: for messages.
        pg_options: is for engines that have options; None.
        device_id: of a CUDA device: this rank's, which is made the current one.
        interface: where this host is reached by others: an interface's name or one of its addresses; by default
            PACELINE_IFACE, or else the one on the route to the host where the ranks meet.
        algorithm: "ring", "halving_doubling", "tree", "star" or "hierarchical" for every collective that it has; by
            default PACELINE_ALGORITHM, or else shared memory on one host and the fastest between hosts.
        between_hosts: the engine ("gloo", "mpi") by which the hosts' first ranks reduce and broadcast what "paceline"
            has reduced within each host; "paceline" itself if None.

    Raises:
        ValueError: a rule is broken; the message names it and the fix.
        RendezvousError: a rank is there twice, gave up or died, or world sizes differ.
        RendezvousTimeoutError: ranks are missing; the message names them.
        AuthenticationError: a process without this job's secret answered.
    """
    global _world
    if _world is not None:
        raise ValueError("the default process group exists already; call destroy_process_group() before a second one")
    chosen = choose(backend)
    require_no_options(pg_options, "init_process_group")
    _require_between(between_hosts, chosen, algorithm)
    _make_current(device_id, chosen)
    timeout = DEFAULT_TIMEOUT if timeout is None else to_timedelta(timeout)
    timeout_s = to_seconds(timeout)
    joined = _meet(chosen, init_method, store, world_size, rank, timeout_s)
    with contextlib.ExitStack() as undo:
        if store is None:
            undo.callback(joined.store.close)
        with Formation(joined.store, joined.rank, joined.world_size) as formation:
            start = Meeting(
                joined.store,
                joined.rank,
                joined.world_size,
                timeout_s,
                formation,
                peer=joined.address,
                interface=interface,
                algorithm=None if between_hosts else algorithm,
            )
            engines = undo.enter_context(contextlib.closing(Engines(start, chosen, between_hosts)))
            world = _open(engines, chosen, range(joined.world_size), timeout, group_name, algorithm)
            world.barrier()  # nobody leaves before all have read what they need from the store
        undo.pop_all()
    _world = _OwnWorld(joined.store, store is None, engines, world, timeout)


def destroy_process_group(group: Group = None) -> None:
    """Ends `group`, or without one the default group and all others; waits for nobody.

    A default group that torch.distributed made goes on until `torch.distributed.destroy_process_group()`; only the
    groups that were made of its ranks here end.

    Raises:
        ValueError: there is none.
    """
    global _world
    world = _require_world()
    if isinstance(group, NonMember):
        return
    if group is not None and group is not world.group:
        group.close()
        return
    if world is not _world:
        world.close_subgroups()
        return
    _world = None
    world.close()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | int | None = None,
    sort_ranks: bool = False,
    *,
    algorithm: str | None = None,
) -> ProcessGroup | NonMember:
    """Makes a group of some of the ranks. Every rank of the default group calls this, in the same order.

    Args:
        ranks: ranks of the default group, in the order of their group ranks; None for all.
        timeout: for calls on the group; the default group's if None.
        backend: as for `init_process_group`; by default the default group's.
        pg_options: is for engines that have options; None.
        use_local_synchronization: only the members call this; those who are in several groups in the same order.
        group_desc: the group's name, for messages.
        device_id: as for `init_process_group`.
        sort_ranks: number the members in the order of their ranks, whatever the order of `ranks` (torch's default).
        algorithm: as for `init_process_group`; by default the default group's.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on a rank that is not in it.

    Raises:
        ValueError: a rank is out of range or named twice.
        RendezvousTimeoutError: a member did not call it.
    """
    world = _require_world()
    require_no_options(pg_options, "new_group")
    _make_current(device_id, world.engines.backend if backend is None else choose(backend))
    chosen = list(range(world.group.size())) if ranks is None else [int(rank) for rank in ranks]
    if sort_ranks:
        chosen.sort()
    for rank in chosen:
        if not 0 <= rank < world.group.size():
            raise ValueError(f"new_group: rank {rank} is not in the default group of {world.group.size()} ranks")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"new_group: ranks is {chosen}; it must name at least one rank, and none twice")
    if use_local_synchronization:
        identity = world.engines.count_local_group(chosen)
    else:
        identity = world.engines.count_group(chosen)
    if world.group.rank() not in chosen:
        if backend is not None and not use_local_synchronization:
            world.engines.start(choose(backend))
        return GroupMember.NON_GROUP_MEMBER
    name = f"group of ranks {chosen}" if group_desc is None else group_desc
    return open_group(chosen, timeout, name, identity, backend, algorithm)


def open_group(
    ranks: Sequence[int],
    timeout: Timeout | None,
    name: str,
    identity: int,
    backend: str | None = None,
    algorithm: str | None = None,
) -> ProcessGroup:
    """The group of `ranks` of the default group, of which this is one; `identity` as for `Engine.open_group`."""
    world = _require_world()
    chosen = world.engines.backend if backend is None else choose(backend)
    timeout = world.timeout if timeout is None else timeout
    group = _open(world.engines, chosen, ranks, timeout, name, algorithm, identity)
    world.subgroups.append(group)
    return group


def _open(
    engines: Engines,
    backend: Backend,
    ranks: Sequence[int],
    timeout: Timeout,
    name: str,
    algorithm: str | None,
    identity: int | None = None,
) -> ProcessGroup:
    engines.start(backend)
    if identity is None:
        identity = engines.count_group(ranks)
    openers = engines.openers(backend, ranks, to_seconds(timeout), identity, algorithm)
    members = [engines.members[rank] for rank in ranks]
    opened = openers["cpu"](torch.device("cpu"))
    group_rank = list(ranks).index(engines.rank)
    return ProcessGroup(opened, members, group_rank, timeout, name, backend.text, openers, everybody=engines.members)


def _meet(
    backend: Backend, init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float
) -> RendezvousResult:
    """Ranks that are told nothing are asked of the engine's launcher, if it has one."""
    told = init_method is not None or store is not None or "RANK" in os.environ
    meet = None if told else meeting(backend, rank)
    try:
        return rendezvous(init_method, store, world_size, rank, timeout_s) if meet is None else meet(timeout_s)
    except OSError as error:
        if not is_shortage(error):
            raise
        own = rank if rank >= 0 else os.environ.get("RANK", "?")
        who = f"rank {own} ({socket.gethostname()}, pid {os.getpid()})"
        raise out_of_descriptors(who, "the store where the ranks meet") from error


def _require_between(between_hosts: str | None, backend: Backend, algorithm: str | None) -> None:
    if between_hosts is None:
        return
    if choose(between_hosts).engines["cpu"] != between_hosts or backend.engines["cpu"] != "paceline":
        raise ValueError(
            f"between_hosts is {between_hosts!r} and the backend {backend.text!r}; it must be one engine for CPU "
            "tensors, beside 'paceline' for those of a host"
        )
    if algorithm not in (None, "hierarchical"):
        raise ValueError(f"between_hosts makes the algorithm hierarchical; algorithm={algorithm!r} excludes it")


def require_no_options(pg_options: None, call: str) -> None:
    """Refuses the options of torch's backends.

    Raises:
        ValueError: there are some.
    """
    if pg_options is not None:
        raise ValueError(f"{call}: pg_options is for engines that have options; leave it out")


def _make_current(device_id: torch.device | int | None, backend: Backend) -> None:
    if device_id is None:
        return
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type not in backend.engines:
        raise ValueError(
            f"device_id is {device_id}; the backend {backend.text!r} has no engine for {device.type}, leave it out"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)


def default_world() -> World:
    """The default group with what it is made of.

    Raises:
        ValueError: there is none.
    """
    return _require_world()


def default_group() -> ProcessGroup:
    """The default group.

    Raises:
        ValueError: there is none.
    """
    return _require_world().group


def resolve(group: Group) -> ProcessGroup | None:
    """The group a call is for; None when this rank is not in it."""
    if group is None:
        return _require_world().group
    return None if isinstance(group, NonMember) else group


def raise_timeouts(least: timedelta) -> None:
    """Gives every group a time-out of at least `least`."""
    world = _require_world()
    for group in (world.group, *world.subgroups):
        group.set_timeout(max(group.timeout, least))


def _find_world() -> World | None:
    if _world is not None:
        return _world
    return None if _borrow is None else _borrow()


def _require_world() -> World:
    world = _find_world()
    if world is None:
        raise ValueError(f"the default process group does not exist; call paceline.init_process_group() first{_hint()}")
    return world


def _hint() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return (
        f" (torch.distributed's default group has the backend {torch.distributed.get_backend()!r}; Paceline would use "
        "one that torch.distributed.init_process_group('paceline') made)"
    )


def is_initialized() -> bool:
    """Whether the default process group exists."""
    return _find_world() is not None


def is_available() -> bool:
    """Whether Paceline works on this platform: True wherever it could be imported."""
    return True


def get_rank(group: Group = None) -> int:
    """This process's rank in `group`, -1 if it is not in it."""
    resolved = resolve(group)
    return -1 if resolved is None else resolved.rank()


def get_world_size(group: Group = None) -> int:
    """The number of ranks in `group`, -1 if this process is not in it."""
    resolved = resolve(group)
    return -1 if resolved is None else resolved.size()


def get_backend(group: Group = None) -> str:
    """What the group's `backend` was: the name of its engine, or "cpu:paceline,cuda:nccl" where there are several."""
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("get_backend: this rank is not in the group")
    return resolved.backend


def get_pg_count() -> int:
    """The number of process groups that this rank has opened since `init_process_group`, the default group included."""
    return 0 if _world is None else 1 + len(_world.subgroups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank among those of its machine, from LOCAL_RANK.

    Raises:
        ValueError: LOCAL_RANK is not set and there is no `fallback_rank`.
    """
    local_rank = os.environ.get("LOCAL_RANK", fallback_rank)
    if local_rank is None:
        raise ValueError("LOCAL_RANK is not set; start the script with `paceline run`, or pass fallback_rank=")
    return int(local_rank)


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The ranks in the default group of `group`'s members, by group rank."""
    resolved = resolve(group)
    return [] if resolved is None else list(resolved.ranks)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The rank in the default group of a member of `group`.

    Raises:
        ValueError: there is no such member.
    """
    if not 0 <= group_rank < group.size():
        raise ValueError(f"group rank {group_rank} is not in {group}; it has ranks 0 to {group.size() - 1}")
    return group.ranks[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The group rank of a rank of the default group.

    Raises:
        ValueError: it is not a member.
    """
    return group_rank_of(group, global_rank)


def _leave_at_exit() -> None:
    if _world is not None:
        destroy_process_group()


def _forget_in_child() -> None:
    global _world
    _world = None


atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
