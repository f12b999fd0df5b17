"""How process groups form: the ranks meet, start the engines, and find each other in a group.

`init.py` has the functions that programs call. `form_apart` and `make_default` make a default group in two parts, for
ranks that form their next group while they still use the one before.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from paceline.descriptors import is_shortage, out_of_descriptors
from paceline.durations import Timeout, to_seconds
from paceline.engine.api import EngineContext, KnownCosts
from paceline.engine.formation import Formation
from paceline.engine.registry import Backend, choose, meeting
from paceline.group.default import OwnWorld, World, adopt
from paceline.group.engines import Engines
from paceline.group.process_group import ProcessGroup
from paceline.group.quantising import QuantisingGroup
from paceline.group.wire import WireKind
from paceline.record import recorder
from paceline.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.store.base import Store


@dataclass(frozen=True)
class Options:
    """What a program may choose for its default group; see `init_process_group`.

    Attributes:
        costs: what messages cost, as far as groups before have measured it; this one adds to that.
        identity: a number that tells the group from others of these ranks (see `engines.agreed_identity`), the same on
            all of them; None for the one that they count.
    """

    name: str = ""
    interface: str | None = None
    algorithm: str | None = None
    between_hosts: str | None = None
    wire: WireKind | None = None
    costs: KnownCosts | None = None
    identity: int | None = None


def meet(
    backend: Backend, init_method: str | None, store: Store | None, world_size: int, rank: int, timeout_s: float
) -> RendezvousResult:
    """Returns this rank and the store; if the caller gives no address, the engine's launcher (mpirun) provides both."""
    told = init_method is not None or store is not None or "RANK" in os.environ
    by_launcher = None if told else meeting(backend, rank)
    try:
        if by_launcher is not None:
            return by_launcher(timeout_s)
        return rendezvous(init_method, store, world_size, rank, timeout_s)
    except OSError as error:
        if not is_shortage(error):
            raise
        own = rank if rank >= 0 else os.environ.get("RANK", "?")
        who = f"rank {own} ({socket.gethostname()}, pid {os.getpid()})"
        raise out_of_descriptors(who, "the store where the ranks meet") from error


def form(joined: RendezvousResult, backend: Backend, timeout: timedelta, options: Options) -> World:
    """Returns the group of all ranks that have met, with what belongs to it; it is not the default group yet."""
    with contextlib.ExitStack() as undo:
        with Formation(joined.store, joined.rank, joined.world_size) as formation:
            start = EngineContext(
                joined.store,
                joined.rank,
                joined.world_size,
                to_seconds(timeout),
                formation,
                peer=joined.address,
                interface=options.interface,
                algorithm=None if options.between_hosts else options.algorithm,
                costs=options.costs,
            )
            engines = undo.enter_context(contextlib.closing(Engines(start, backend, options.between_hosts)))
            ranks, identity = range(joined.world_size), options.identity
            group = open_on(
                engines, backend, ranks, timeout, options.name, options.algorithm, identity, wire=options.wire
            )
        undo.pop_all()
    return World(joined.store, engines, group, timeout)


def form_apart(store: Store, rank: int, world_size: int, timeout: timedelta, options: Options) -> World:
    """Returns a group of Paceline's engine, beside the default group that there may be; any thread may form it.

    Args:
        store: where the ranks meet; it stays the caller's.
        rank, world_size: this rank, and how many there are.
        timeout: how long to wait for the others, and how long the group's calls do.
        options: those of the group.

    Raises:
        RendezvousError, AuthenticationError, StoreError: the ranks did not find each other.
    """
    backend = choose("paceline")
    recorder.begin()
    joined = meet(backend, None, store, world_size, rank, to_seconds(timeout))
    return form(joined, backend, timeout, options)


def make_default(world: World) -> None:
    """Makes the group that `form_apart` has returned the default group; there is none at the moment."""
    recorder.identify(world.group.rank(), world.group.size())
    adopt(OwnWorld(world.store, False, world.engines, world.group, world.timeout))


def open_on(
    engines: Engines,
    backend: Backend,
    ranks: Sequence[int],
    timeout: Timeout,
    name: str,
    algorithm: str | None,
    identity: int | None = None,
    wire: WireKind | None = None,
) -> ProcessGroup:
    """Opens the group of `ranks`, in which all of them find each other; each of them calls this."""
    engines.start(backend)
    if identity is None:
        identity = engines.count_group(ranks)
    openers = engines.openers(backend, ranks, to_seconds(timeout), identity, algorithm)
    members = [engines.members[rank] for rank in ranks]
    opened = openers["cpu"](torch.device("cpu"))
    group_rank = list(ranks).index(engines.rank)
    everybody = engines.members
    kind = ProcessGroup if wire is None else QuantisingGroup
    group = kind(
        opened, members, group_rank, timeout, name, backend.text, openers, everybody=everybody, identity=identity
    )
    group.wire = wire
    try:
        # No rank may end the group, or its store, before all ranks have found each other in it.
        group.barrier()
    except BaseException:
        group.close()
        raise
    return group
