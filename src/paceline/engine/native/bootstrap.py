"""Exchanges addresses through the store, derives the topology, and connects the ranks of this host by Unix sockets."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline import _core
from paceline.engine.failures import Member
from paceline.engine.formation import Formation
from paceline.engine.introduction import host_id, introduce, read
from paceline.engine.native.dialing import Arrivals, dial
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.security.doorkeeper import Doorkeeper
from paceline.security.encryption import Connection, plain
from paceline.security.handshake import HandshakeUnfinishedError, Hello
from paceline.security.peers import is_same_user
from paceline.security.secret import derive_key, job_secret

MAX_RANKS_OF_HOST = 64
_CHANNEL = "mesh"
_LOOK_S = 0.5
_PAUSE_S = 0.005


@dataclass(frozen=True)
class Topology:
    """The ranks and where they run: `members[r]` is rank r of the default group; `hosts` lists each host's ranks."""

    rank: int
    members: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    nonce: str  # identifies this rendezvous; it is the same on all ranks

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, in the order in which the mesh numbers them."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)


def join(
    formation: Formation, settings: Mapping[str, str | int | None], timeout_s: float
) -> tuple[Topology, _core.Mesh]:
    """Connects this rank to the other ranks of its host; returns the topology of the job and the mesh of this host.

    Args:
        formation: the default group's formation.
        settings: the values, by name, that must be the same on all ranks.
        timeout_s: how long to wait for the other ranks, in seconds.

    Raises:
        RendezvousError: a rank gave up or died, this host has more ranks than can be connected, or the ranks differ in
            version or settings.
        RendezvousTimeoutError: a rank did not publish its address, or did not connect.
        AuthenticationError: another process answered at a rank's address.
    """
    store, rank, world_size = formation.store, formation.rank, formation.world_size
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"paceline-{secrets.token_hex(12)}"
        listener.bind(f"\0{name}")
        listener.listen(MAX_RANKS_OF_HOST)
        if rank == 0:
            store.set("engine/nonce", secrets.token_hex(16))
        store.set(f"engine/{rank}", introduce(host_id=host_id(), socket=name, **settings))
        if late := formation.absent([f"engine/{r}" for r in range(world_size)], deadline):
            named = ", ".join(f"rank {key.rpartition('/')[2]}" for key in late)
            raise RendezvousTimeoutError(
                f"rank {rank} waited {timeout_s:.0f} s for {named} to say where to connect; look at the output there"
            )
        nonce, *answers = store.multi_get(["engine/nonce", *(f"engine/{r}" for r in range(world_size))])
        members, peers = read(answers, rank)
        for setting, value in settings.items():
            _require_alike(members, setting, value, [peer.get(setting) for peer in peers], members[rank])

        hosts: dict[str, list[int]] = {}
        for peer, entry in enumerate(peers):
            hosts.setdefault(str(entry["host_id"]), []).append(peer)
        topology = Topology(rank, members, tuple(map(tuple, hosts.values())), nonce.decode())
        local = topology.local_ranks
        if len(local) > MAX_RANKS_OF_HOST:
            raise RendezvousError(
                f"{members[rank]}: {len(local)} ranks are on this host; at most {MAX_RANKS_OF_HOST} are connected there"
            )
        names = {r: str(peers[r]["socket"]) for r in local}
        connections = _connect(formation, topology, names, listener, cleanup, deadline)
        sockets = [-1 if peer == rank else connections[peer].detach() for peer in local]
    return topology, _core.Mesh(local.index(rank), sockets, local)


def _connect(
    formation: Formation,
    topology: Topology,
    names: Mapping[int, str],
    listener: socket.socket,
    cleanup: contextlib.ExitStack,
    deadline: float,
) -> dict[int, socket.socket]:
    """Connects to the lower ranks of this host and accepts connections from the higher ones."""
    rank, local = topology.rank, topology.local_ranks
    key = derive_key(job_secret(), f"{_CHANNEL} {topology.nonce}")
    arrivals = Arrivals()

    def admit(connection: Connection, hello: Hello) -> None:
        if is_same_user(plain(connection)):
            arrivals.admit(connection, hello)
        else:
            connection.close()

    doorkeeper = Doorkeeper(listener, key, _CHANNEL, admit)
    cleanup.callback(arrivals.close)
    cleanup.callback(doorkeeper.close)
    connections: dict[int, socket.socket] = {}
    for peer in local:
        if peer >= rank:
            break
        try:
            connection = dial(functools.partial(_reach, names[peer]), key, Hello(_CHANNEL, rank), deadline)
        except (OSError, HandshakeUnfinishedError) as error:
            formation.await_news()
            raise RendezvousError(
                f"{topology.members[rank]}: {topology.members[peer]} does not answer at its Unix socket ({error}); "
                "look at its output"
            ) from error
        connections[peer] = cleanup.enter_context(plain(connection))
    while len(connections) < len(local) - 1:
        left_s = max(0.1, deadline - time.monotonic())
        arrived = arrivals.take(min(left_s, _LOOK_S))
        if arrived is None:
            formation.look()
            doorkeeper.require_descriptors()
            if left_s > _LOOK_S:
                continue
            absent = [str(topology.members[r]) for r in local if r != rank and r not in connections]
            raise RendezvousTimeoutError(
                f"{topology.members[rank]}: {', '.join(absent)} published their addresses and then did not connect "
                "in time; look at their output"
            )
        hello, connection = arrived
        cleanup.enter_context(connection)
        if rank < hello.rank and hello.rank in local:
            connections[hello.rank] = plain(connection)  # the latest one counts: the peer has given up those before
    return connections


def _reach(name: str, left_s: float) -> socket.socket:
    deadline = time.monotonic() + left_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(left_s)
        while True:
            try:
                connection.connect(f"\0{name}")
                return connection
            except BlockingIOError:  # the listener's queue of pending connections is full
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
    except BaseException:
        connection.close()
        raise


def _require_alike(members: tuple[Member, ...], setting: str, mine: object, values: list[object], me: Member) -> None:
    for member, value in zip(members, values, strict=True):
        if value != mine:
            raise RendezvousError(
                f"{me}: {setting} is {mine!r} here and {value!r} on {member}; it must be the same on all ranks"
            )
