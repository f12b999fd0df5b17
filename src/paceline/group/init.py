"""Makes and ends process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch

from paceline.durations import Timeout, to_seconds, to_timedelta
from paceline.engine.registry import choose
from paceline.group.default import (
    Group,
    GroupMember,
    NonMember,
    OwnWorld,
    adopt,
    default_world,
    leave,
    own_world,
    resolve,
)
from paceline.group.forming import Options, form, meet, open_on
from paceline.group.init_arguments import (
    make_current,
    require_between,
    require_elastic,
    require_no_options,
    require_wire,
)
from paceline.group.process_group import ProcessGroup
from paceline.group.wire import WireKind
from paceline.one_port.choice import choose_port
from paceline.record import recorder
from paceline.security.levels import choose_level
from paceline.store.base import Store
from paceline.store.hash import HashStore

DEFAULT_TIMEOUT = default_pg_timeout = timedelta(minutes=30)  # the second name is torch's


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
    elastic: bool = False,
    security: str | None = None,
    port: int | None = None,
    wire: WireKind | None = None,
) -> None:
    """Makes the default process group. Every rank calls this once, and it returns when all ranks have called it.

    A program that does not call it uses the default group of torch.distributed, if the backend of that is "paceline".
    While the group exists, torch.distributed uses Paceline for CPU tensors if a program names no backend, as is the
    case with `fully_shard`.

    Args:
        backend: the engine: "paceline", "gloo" or "mpi" for CPU tensors, "nccl" for CUDA tensors, or one for each, such
            as "cpu:gloo,cuda:nccl". The default is the best one that is available for each. CPU tensors use "paceline"
            if no other engine is named for them.
        init_method: "env://" (the default), "tcp://host:port" or "file:///path"; see `rendezvous`. It is not needed
            with "mpi" if mpirun has started the ranks.
        timeout: how long this call and every later one waits for the other ranks, as a timedelta or in seconds. The
            default is 30 minutes.
        world_size, rank: the number of ranks, and the rank of this process; with env:// they may be in the environment.
        store: a store that all ranks share, instead of `init_method`; it requires `world_size` and `rank`.
        group_name: the group's name in messages.
        pg_options: must be None; no engine has options.
        device_id: this rank's CUDA device, which becomes the current device.
        interface: the network interface through which other hosts reach this one, by its name or one of its addresses.
            The default is PACELINE_IFACE, or else the interface on the route to the host where the ranks meet.
        algorithm: "ring", "halving_doubling", "tree", "star" or "hierarchical", for every collective that it offers.
            The default is PACELINE_ALGORITHM, or else shared memory on one host and the fastest algorithm between
            hosts.
        between_hosts: the engine ("gloo", "mpi") with which the first rank of each host reduces and broadcasts what
            "paceline" has reduced within the host; "paceline" itself if None.
        elastic: whether workers come and go; the group has this one rank until `ElasticState.epochs` finds the others.
            The job is started with `paceline run --elastic`, or is this one process.
        security: "encrypt" encrypts all connections to other hosts, "auth" only authenticates them, and "none" does
            neither. The default is PACELINE_SECURITY, or else they are encrypted where an address is public.
        port: the one TCP port of each machine at which the others reach its ranks and its store, the same on every
            rank; see docs/hosts.md. The default is PACELINE_PORT, or else each listener has a port of its own.
        wire: what sums of floats in this group are rounded to between hosts ("bf16", "int8", "int4") where a call does
            not say so itself, for tensors of at least 1,024 elements; see docs/slow-networks.md. Other groups are
            exact unless they have a `wire` of their own.

    Raises:
        ValueError: the default group exists already, or an argument is wrong; the message says what to do.
        RendezvousError: two processes claim one rank, a rank gave up or died, or world sizes differ.
        RendezvousTimeoutError: ranks are missing; the message names them.
        AuthenticationError: the process that answered does not have this job's secret.
    """
    if own_world() is not None:
        raise ValueError("the default process group exists already; call destroy_process_group() before a second one")
    if security is not None:
        choose_level(security)
    if port is not None:
        choose_port(port)
    if elastic:
        require_elastic(backend, init_method, store, world_size, rank)
        backend, world_size, rank, store = "paceline", 1, 0, HashStore()
    chosen = choose(backend)
    require_no_options(pg_options, "init_process_group")
    require_between(between_hosts, chosen, algorithm)
    require_wire(wire, chosen, between_hosts, elastic)
    make_current(device_id, chosen)
    timeout = DEFAULT_TIMEOUT if timeout is None else to_timedelta(timeout)
    recorder.begin()
    joined = meet(chosen, init_method, store, world_size, rank, to_seconds(timeout))
    recorder.identify(joined.rank, joined.world_size)
    with contextlib.ExitStack() as undo:
        if store is None:
            undo.callback(joined.store.close)
        options = Options(group_name, interface, algorithm, between_hosts, wire)
        world = form(joined, chosen, timeout, options)
        undo.pop_all()
    adopt(OwnWorld(world.store, store is None, world.engines, world.group, timeout))


def destroy_process_group(group: Group = None) -> None:
    """Ends `group`, or the default group and all others if it is None. It does not wait for the other ranks.

    A default group that torch.distributed made continues until `torch.distributed.destroy_process_group()`; only the
    groups that were made of its ranks here end.

    Args:
        group: the group to end; the default group and all groups made of its ranks if None.

    Raises:
        ValueError: the default group does not exist.
        TypeError: `group` is not a group of Paceline's.
    """
    world = default_world()
    ended = resolve(group)
    if ended is None:
        return
    if ended is not world.group:
        ended.close()
    elif world is own_world():
        leave()
    else:
        world.close_subgroups()


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
    wire: WireKind | None = None,
) -> ProcessGroup | NonMember:
    """Makes a group of some of the ranks. Every rank of the default group calls this, in the same order.

    Args:
        ranks: ranks of the default group, in the order of their group ranks; all if None.
        timeout: for calls on the group; the default group's if None.
        backend: as for `init_process_group`; by default the default group's.
        pg_options: must be None; no engine has options.
        use_local_synchronization: whether only the members call this; ranks that are in several such groups call it in
            the same order.
        group_desc: the group's name, for messages.
        device_id: as for `init_process_group`.
        sort_ranks: whether the members' group ranks follow the order of their ranks, whatever the order of `ranks` is
            (torch's default).
        algorithm: as for `init_process_group`; by default the default group's.
        wire: as for `init_process_group`; by default exact, whatever the default group's is.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on a rank that is not in it.

    Raises:
        ValueError: a rank is out of range or listed twice.
        RendezvousTimeoutError: a member did not call this.
    """
    world = default_world()
    require_no_options(pg_options, "new_group")
    of_devices = world.engines.backend if backend is None else choose(backend)
    require_wire(wire, of_devices, world.engines.between_hosts)
    make_current(device_id, of_devices)
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
    return open_group(chosen, timeout, name, identity, backend, algorithm, wire)


def open_group(
    ranks: Sequence[int],
    timeout: Timeout | None,
    name: str,
    identity: int,
    backend: str | None = None,
    algorithm: str | None = None,
    wire: WireKind | None = None,
) -> ProcessGroup:
    """Opens a group of `ranks` of the default group, which this rank is one of.

    The argument `identity` is that of `Engine.open_group`.
    """
    world = default_world()
    chosen = world.engines.backend if backend is None else choose(backend)
    timeout = world.timeout if timeout is None else timeout
    group = open_on(world.engines, chosen, ranks, timeout, name, algorithm, identity, wire)
    world.subgroups.append(group)
    return group
