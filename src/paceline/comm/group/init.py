"""Functions that create and destroy process groups: `init_process_group`, `new_group`, `destroy_process_group`.

A group is formed in three steps: the ranks perform a rendezvous (`perform_rendezvous`), start the engines, and connect
to each other (`form`). `form_apart` and `make_default` split the creation of a default group into two steps, for ranks
that form their next group while they still use the current one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index

import torch

from paceline.comm.engine.adapters.device_streams import current_accelerator
from paceline.comm.engine.api import BackendChoice, EngineContext, KnownCosts, choose, launcher_rendezvous, staged_types
from paceline.comm.engine.formation import Formation
from paceline.comm.group.compression import WireKind, checked_kind
from paceline.comm.group.default import (
    Group,
    GroupMember,
    NonMember,
    OwnWorld,
    World,
    default_world,
    forget_parent,
    leave,
    own_world,
    resolve,
    set_default_world,
)
from paceline.comm.group.engines import Engines, identity_named, permitted
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.one_port.dialer import choose_port
from paceline.comm.record import recorder
from paceline.comm.rendezvous.environment import rank_and_world_size
from paceline.comm.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.comm.security.secret import choose_level
from paceline.comm.store.store import HashStore, Store
from paceline.durations import Timeout, to_seconds, whole_number
from paceline.errors import short_repr
from paceline.linux import is_out_of_descriptors, out_of_descriptors_error

DEFAULT_TIMEOUT = default_pg_timeout = timedelta(minutes=30)  # torch uses the second name


@dataclass(frozen=True)
class GroupOptions:
    """Options for a default group; see `init_process_group`.

    Attributes:
        costs: the link costs measured by earlier groups, or None; this group adds its own measurements to them.
        identity: a number, the same on all ranks, that distinguishes the group from other groups of these ranks (see
            `engines.agreed_identity`). If None, groups are numbered in the order of their creation.
    """

    name: str = ""
    interface: str | None = None
    algorithm: str | None = None
    between_hosts: str | None = None
    wire: WireKind | None = None
    costs: KnownCosts | None = None
    identity: int | None = None


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
    """Creates the default process group. Every rank must call this once; it returns when all ranks have called it.

    A program that does not call this function uses torch.distributed's default group, provided that this group's
    backend is "paceline". While the group created by this function exists and PyTorch finds no GPU, torch.distributed
    uses Paceline for CPU tensors if no backend is specified, for instance in `fully_shard`.

    Args:
        backend: the engine: "paceline", "gloo" or "mpi" for CPU tensors, "nccl" for CUDA tensors, or one for each type
            of device, such as "cpu:gloo,cuda:nccl". By default, the best available engine is used for each type. CPU
            tensors use "paceline" unless another engine is specified for them.
        init_method: "env://" (the default), "tcp://host:port" or "file:///path"; see `rendezvous`. Not needed with
            "mpi" if mpirun has started the ranks.
        timeout: the timeout for this call and for each later call, as a timedelta or in seconds. The default is 30
            minutes.
        world_size, rank: the number of ranks and the rank of this process; with env:// they can be taken from the
            environment.
        store: a store that all ranks share, instead of `init_method`; it requires `world_size` and `rank`.
        group_name: the group's name in error messages.
        pg_options: must be None; no engine has options.
        device_id: this rank's accelerator, given as a device with an index or by its index alone. It becomes the
            current device and is used by `barrier`. The ranks' devices are connected immediately rather than on first
            use, so this function itself reports a wrong device. Either all ranks or none must pass this argument.
        interface: the network interface through which other hosts reach this host, given by its name or by one of its
            addresses. The default is PACELINE_IFACE or, if it is not set, the interface on the route to the host of the
            rendezvous.
        algorithm: the algorithm for every collective that it implements: "ring", "halving_doubling", "tree", "star" or
            "hierarchical". The default is PACELINE_ALGORITHM. If it is not set, shared memory is used on one host, and
            the fastest algorithm between hosts.
        between_hosts: the engine ("gloo" or "mpi") over which the first ranks on the hosts exchange results that
            "paceline" has reduced within each host. If None, "paceline" is also used between hosts.
        elastic: whether workers may join and leave. The group contains only this rank until `ElasticState.epochs` finds
            the other workers. The job must be started with `paceline run --elastic`, or consist of this process only.
        security: "encrypt" encrypts all connections to other hosts, "auth" only authenticates them, and "none" does
            neither. The default is PACELINE_SECURITY; without it, connections to and from public addresses are
            encrypted.
        port: the single TCP port on which each machine accepts connections to its ranks and its store (see
            docs/hosts.md). It must be the same on every rank. The default is PACELINE_PORT. If it is not set, each
            listener has its own port.
        wire: the format ("bf16", "int8", "int4") to which this group rounds sums of floats between hosts, for tensors
            of at least 1,024 elements in calls without a `wire` argument; see docs/slow-networks.md. Sums in other
            groups are exact unless the group is created with a `wire`.

    Raises:
        ValueError: the default group already exists, or an argument is invalid; the message suggests a fix.
        RendezvousError: two processes claim the same rank, a rank gave up or died, or world sizes differ.
        RendezvousTimeoutError: ranks are missing; the message lists them.
        AuthenticationError: the other end of a connection does not have this job's secret.
    """
    if own_world() is not None:
        raise ValueError(
            "the default process group exists already; call destroy_process_group() before creating a second one"
        )
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
    device = make_current(device_id, chosen)
    timeout_s = to_seconds(DEFAULT_TIMEOUT if timeout is None else timeout)
    recorder.begin()
    with contextlib.ExitStack() as undo, _recorded(rank, world_size):
        joined = perform_rendezvous(chosen, init_method, store, world_size, rank, timeout_s)
        recorder.identify(joined.rank, joined.world_size)
        if store is None:
            undo.callback(joined.store.close)
        options = GroupOptions(group_name, interface, algorithm, between_hosts, wire)
        world = form(joined, chosen, timeout_s, options)
        undo.callback(world.engines.close)
        world.group.bind(device)
        undo.pop_all()
    set_default_world(OwnWorld(world.store, store is None, world.engines, world.group, timeout_s))


@contextlib.contextmanager
def _recorded(rank: int, world_size: int) -> Iterator[None]:
    """Records the formation of the default group, if this process knows its rank before the rendezvous."""
    try:
        rank, world_size = rank_and_world_size(rank, world_size)
    except ValueError:
        yield
        return
    with recorder.recorded_formation("", identity_named("init_process_group"), rank, range(world_size)):
        yield


def destroy_process_group(group: Group = None) -> None:
    """Destroys `group` without waiting for the other ranks.

    If torch.distributed created the default group, the group exists until `torch.distributed.destroy_process_group()`
    is called; this function then destroys only the groups that Paceline created from its ranks.

    Args:
        group: the group to destroy; if None, the default group and all groups created from its ranks.

    Raises:
        ValueError: the default group does not exist.
        TypeError: `group` is not a Paceline group.
    """
    if group is None and forget_parent():
        return
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
    """Creates a group of the given ranks. All ranks in the default group must call this, in the same order.

    Args:
        ranks: the members' ranks in the default group, in the order of their group ranks; all ranks if None.
        timeout: the timeout for calls on the group; the default group's timeout if None.
        backend: the backend, as in `init_process_group`; the default group's backend if None.
        pg_options: must be None; no engine has options.
        use_local_synchronization: whether only the members call this. Ranks that are in several such groups must create
            them in the same order.
        group_desc: the group's name in error messages.
        device_id: this rank's accelerator, as in `init_process_group`.
        sort_ranks: whether the group ranks follow numerical order (torch's default) rather than the order of `ranks`.
        algorithm: the algorithm, as in `init_process_group`; the default group's algorithm if None.
        wire: the format, as in `init_process_group`. If None, sums are exact, even if the default group has a `wire`.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER` on a rank that is not in it.

    Raises:
        ValueError: a rank is out of range or listed twice.
        RendezvousTimeoutError: a member did not call this function.
    """
    world = default_world()
    require_no_options(pg_options, "new_group")
    of_devices = world.engines.backend if backend is None else choose(backend)
    require_wire(wire, of_devices, world.engines.between_hosts)
    device = make_current(device_id, of_devices)
    if timeout is not None:
        to_seconds(timeout)  # an invalid timeout raises an error on all ranks, not only on members
    if ranks is not None and (isinstance(ranks, str) or not isinstance(ranks, Iterable)):
        raise TypeError(f"new_group: ranks is {short_repr(ranks)}; it must be a list of ranks, or None for all ranks")
    try:
        chosen = [index(rank) for rank in (range(world.group.size()) if ranks is None else ranks)]
    except TypeError as error:
        raise TypeError(f"new_group: ranks is {short_repr(ranks)}; it must contain only integers: {error}") from None
    if sort_ranks:
        chosen.sort()
    for rank in chosen:
        if not 0 <= rank < world.group.size():
            raise ValueError(f"new_group: rank {rank} is not in the default group of {world.group.size()} ranks")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"new_group: ranks is {chosen}; it must contain at least one rank, and none twice")
    if use_local_synchronization:
        identity = world.engines.count_local_group(chosen)
    else:
        identity = world.engines.count_group(chosen)
    if world.group.rank() not in chosen:
        if backend is not None and not use_local_synchronization:
            world.engines.start(choose(backend))
        return GroupMember.NON_GROUP_MEMBER
    name = f"group of ranks {chosen}" if group_desc is None else group_desc
    group = open_group(chosen, timeout, name, identity, backend, algorithm, wire)
    group.bind(device)
    return group


def open_group(
    ranks: Sequence[int],
    timeout: Timeout | None,
    name: str,
    identity: int,
    backend: str | None = None,
    algorithm: str | None = None,
    wire: WireKind | None = None,
) -> ProcessGroup:
    """Opens a group of `ranks` (ranks in the default group), which must include this rank.

    See `Engine.open_group` for `identity`.
    """
    world = default_world()
    chosen = world.engines.backend if backend is None else choose(backend)
    timeout_s = world.timeout_s if timeout is None else to_seconds(timeout)
    with recorder.recorded_formation(name, identity, list(ranks).index(world.engines.rank), ranks):
        group = open_on(world.engines, chosen, ranks, timeout_s, name, algorithm, identity, wire)
    world.subgroups.append(group)
    return group


def open_on(
    engines: Engines,
    backend: BackendChoice,
    ranks: Sequence[int],
    timeout_s: float,
    name: str,
    algorithm: str | None,
    identity: int | None = None,
    wire: WireKind | None = None,
) -> ProcessGroup:
    """Opens the group of `ranks`. Every member must call this; it returns when all members have opened the group."""
    engines.start(backend)
    backend = permitted(backend, engines.rank, engines.members)
    if identity is None:
        identity = engines.count_group(ranks)
    openers = engines.openers(backend, ranks, timeout_s, identity, algorithm)
    members = [engines.members[rank] for rank in ranks]
    opened = openers["cpu"](torch.device("cpu"))
    group_rank = list(ranks).index(engines.rank)
    group = ProcessGroup(
        opened,
        members,
        group_rank,
        timeout_s,
        name,
        backend.text,
        openers,
        engine_members=engines.members,
        identity=identity,
        wire=wire,
    )
    try:
        # No rank may close the group or its store before all ranks are connected.
        group.barrier()
    except BaseException:
        group.close()
        raise
    return group


def form_apart(store: Store, rank: int, world_size: int, timeout_s: float, options: GroupOptions) -> World:
    """Forms a group with the engine "paceline", independently of the default group; any thread may call this.

    The caller closes the store. `timeout_s` applies to the formation of the group and to its calls.
    """
    backend = choose("paceline")
    recorder.begin()
    joined = perform_rendezvous(backend, None, store, world_size, rank, timeout_s)
    return form(joined, backend, timeout_s, options)


def make_default(world: World) -> None:
    """Sets a group formed by `form_apart` as the default group. A default group must not exist yet."""
    recorder.identify(world.group.rank(), world.group.size())
    set_default_world(OwnWorld(world.store, False, world.engines, world.group, world.timeout_s))


def form(joined: RendezvousResult, backend: BackendChoice, timeout_s: float, options: GroupOptions) -> World:
    """Returns a world that connects all ranks in a rendezvous; its group is not the default group yet."""
    with contextlib.ExitStack() as undo:
        with Formation(joined.store, joined.rank, joined.world_size) as formation:
            context = EngineContext(
                joined.store,
                joined.rank,
                joined.world_size,
                timeout_s,
                formation,
                peer=joined.address,
                interface=options.interface,
                algorithm=None if options.between_hosts else options.algorithm,
                costs=options.costs,
            )
            engines = undo.enter_context(contextlib.closing(Engines(context, backend, options.between_hosts)))
            ranks, identity = range(joined.world_size), options.identity
            group = open_on(
                engines, backend, ranks, timeout_s, options.name, options.algorithm, identity, wire=options.wire
            )
        undo.pop_all()
    return World(joined.store, engines, group, timeout_s)


def perform_rendezvous(
    backend: BackendChoice, init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float
) -> RendezvousResult:
    """Performs the rendezvous. Without an address, the engine's launcher (mpirun) provides the rank and store."""
    has_address = init_method is not None or store is not None or "RANK" in os.environ
    by_launcher = None if has_address else launcher_rendezvous(backend, rank)
    try:
        if by_launcher is not None:
            return by_launcher(timeout_s)
        return rendezvous(init_method, store, world_size, rank, timeout_s)
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        own_rank = rank if rank >= 0 else os.environ.get("RANK", "?")
        who = f"rank {own_rank} ({socket.gethostname()}, pid {os.getpid()})"
        raise out_of_descriptors_error(who, "the store for the rendezvous") from error


def make_current(device_id: torch.device | int | None, backend: BackendChoice) -> torch.device | None:
    """Makes an accelerator the current device and returns it, or returns None if `device_id` is None or a CPU."""
    if device_id is None:
        return None
    accelerator = current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    device = torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type not in backend.engines and device.type not in staged_types(backend):
        raise ValueError(
            f"device_id is {device_id}; the backend {backend.text!r} has no engine for {device.type}, leave it out"
        )
    if device.type == "cpu":
        return None
    if accelerator is None or device.type != accelerator.type:
        raise ValueError(
            f"device_id is {device_id}; the accelerator of this torch here is {accelerator}. Leave device_id out, or "
            "check why torch does not find the other one"
        )
    if device.index is None:
        raise ValueError(f"device_id is {device}, without an index; pass torch.device({device.type!r}, LOCAL_RANK)")
    if device.index >= (count := torch.accelerator.device_count()):
        raise ValueError(
            f"device_id is {device}, and this process sees {count} of them; pass the local rank (LOCAL_RANK), start no "
            "more ranks than there are devices, and look at CUDA_VISIBLE_DEVICES"
        )
    torch.accelerator.set_device_index(device.index)
    return device


def require_elastic(
    backend: str | None, init_method: str | None, store: Store | None, world_size: int, rank: int
) -> None:
    """Checks that these arguments are valid in an elastic job."""
    if backend not in (None, "paceline", "cpu:paceline"):
        raise ValueError(
            f"backend is {backend!r} with elastic=True; elastic training runs on 'paceline', which adds gradients in "
            "host memory, also those of parameters on GPUs. On 'nccl' it would need a new communicator in every view"
        )
    if init_method is not None or store is not None or world_size >= 0 or rank >= 0:
        raise ValueError(
            "elastic=True excludes init_method, store, world_size and rank, because the launcher determines the members"
        )
    if "PACELINE_ELASTIC_FD" not in os.environ and (whole_number(os.environ.get("WORLD_SIZE", "")) or 1) > 1:
        raise ValueError(
            f"rank {os.environ.get('RANK', '?')}: elastic=True in a job of {os.environ['WORLD_SIZE']} ranks whose "
            "launcher is not elastic; start it with `paceline run --elastic`"
        )


def require_between(between_hosts: str | None, backend: BackendChoice, algorithm: str | None) -> None:
    """Checks that `between_hosts` is compatible with the other arguments."""
    if between_hosts is None:
        return
    if choose(between_hosts).engines["cpu"] != between_hosts or backend.engines["cpu"] != "paceline":
        raise ValueError(
            f"between_hosts is {between_hosts!r} and the backend {backend.text!r}; it must be one engine for CPU "
            "tensors, in addition to 'paceline' within each host"
        )
    if algorithm not in (None, "hierarchical"):
        raise ValueError(
            f"between_hosts requires the hierarchical algorithm and cannot be combined with algorithm={algorithm!r}"
        )


def require_wire(wire: object, backend: BackendChoice, between_hosts: str | None, elastic: bool = False) -> None:
    """Checks that a group's `wire` is a format that is compatible with the other arguments."""
    if wire is None:
        return
    kind = checked_kind(wire)
    if backend.engines["cpu"] != "paceline" or between_hosts is not None:
        raise ValueError(
            f"wire={kind!r} needs the engine 'paceline', also between the hosts; the backend is {backend.text!r} and "
            f"between_hosts {between_hosts!r}. Omit wire, or omit both of these"
        )
    if elastic:
        raise ValueError(f"wire={kind!r} excludes elastic=True, because elastic jobs average gradients exactly")


def require_no_options(pg_options: None, call: str) -> None:
    """Checks that `pg_options`, an argument for torch's backends, is None."""
    if pg_options is not None:
        raise ValueError(f"{call}: pg_options is for engines that have options; leave it out")
