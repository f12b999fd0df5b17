"""Bootstrap of the native engine: address exchange through the store, topology, and connections within a host.

A host's first rank creates the host directory, the shared memory in which ranks find each other
(native/shm/host_directory.hpp). The descriptor of this memory is passed down a tree of connections. Both ends of a
connection authenticate with the job's secret, so only ranks with the secret receive the directory. A rank makes one
connection and accepts at most `FAN_OUT` connections, regardless of the number of ranks.

`dial` and `acknowledge` are the two ends of a connection between ranks, on one host or on several. A connection is
valid once the accepting end has acknowledged the proof.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline import _core
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation, describe_rank, host_id, read_ranks
from paceline.comm.security.authenticated_listener import AuthenticatedListener
from paceline.comm.security.encryption import Connection, plain
from paceline.comm.security.handshake import HandshakeUnfinishedError, PeerHello, encrypt_as_client, prove
from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.security.untrusted_peers import is_same_user
from paceline.durations import socket_timeout_s
from paceline.errors import RendezvousError, RendezvousTimeoutError, and_more

_WELCOME = b"\x01"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


def dial(
    open_connection: Callable[[float], socket.socket],
    key: bytes,
    hello: PeerHello,
    deadline: float,
    secret: bytes | None = None,
) -> Connection:
    """Connects and proves this rank's identity; retries while the other end drops connections without reading data.

    The pause before each new attempt is twice as long as the previous one, but at most half of the remaining time.

    Args:
        open_connection: a function that opens a connection within the given number of seconds.
        key: the secret shared by both ends.
        hello: this rank's first message, which the proof covers.
        deadline: the time on the monotonic clock, in seconds, at which to stop retrying.
        secret: the job's secret, which determines the certificate of encrypted connections.

    Raises:
        OSError: no process is listening on that address.
        AuthenticationError: the other end does not have the key, or did not answer in time.
        HandshakeUnfinishedError: the other end was still dropping connections at the deadline.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = socket_timeout_s(deadline - time.monotonic())
        plain: socket.socket | None = None
        try:
            plain = open_connection(left_s)
            connection = encrypt_as_client(plain, secret, left_s)
            prove(connection, key, hello, left_s)
            _await_welcome(connection, left_s)
            connection.settimeout(None)
            return connection
        except HandshakeUnfinishedError:
            if plain is not None:
                plain.close()
            left_s = deadline - time.monotonic()
            if left_s <= _FIRST_PAUSE_S:
                raise
            time.sleep(min(pause_s, left_s / 2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException:
            if plain is not None:
                plain.close()
            raise


def _await_welcome(connection: Connection, timeout_s: float) -> None:
    """Waits for the acknowledgment, because a busy listener may drop a connection before reading the proof."""
    connection.settimeout(timeout_s)
    try:
        if connection.recv(1) == _WELCOME:
            return
    except OSError:
        pass
    raise HandshakeUnfinishedError("the other end closed the connection before it had read the proof")


def acknowledge(connection: Connection) -> None:
    """Acknowledges the proof from the connecting end."""
    connection.sendall(_WELCOME)


class AcceptedConnections:
    """A queue that passes accepted connections to the thread that is waiting for them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PeerHello, Connection]] = queue.SimpleQueue()

    def admit(self, connection: Connection, hello: PeerHello) -> None:
        """Acknowledges the other end's proof and queues the connection."""
        acknowledge(connection)
        self._queue.put((hello, connection))

    def take(self, timeout_s: float) -> tuple[PeerHello, Connection] | None:
        """Returns the next connection, or None if none arrives within `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Closes the connections that are still queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()[1].close()


@dataclass(frozen=True)
class Topology:
    """The ranks in a job and their hosts.

    Attributes:
        rank: this rank in the default group.
        members: the ranks in the default group, in order.
        hosts: the ranks on each host.
        nonce: a string that identifies this rendezvous, the same on all ranks.
    """

    rank: int
    members: tuple[RankIdentity, ...]
    hosts: tuple[tuple[int, ...], ...]
    nonce: str

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, in the order of their mesh ranks."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    def hosts_of(self, ranks: Sequence[int]) -> list[list[int]]:
        """Returns the group ranks on each host for a group of `ranks`; hosts without members are omitted."""
        group_rank_of = {rank: group_rank for group_rank, rank in enumerate(ranks)}
        by_host = [sorted(group_rank_of[rank] for rank in host if rank in group_rank_of) for host in self.hosts]
        return [group_ranks for group_ranks in by_host if group_ranks]


FAN_OUT = 16
_CHANNEL = "directory"
_BYTE = b"\x01"  # a message must contain a byte besides the descriptor
_LOOK_S = 0.5
_PAUSE_S = 0.005
_MOST_NAMED = 4


def join_host_mesh(
    formation: Formation, topology: Topology, names: Mapping[int, str], listener: socket.socket, deadline: float
) -> _core.HostMesh:
    """Waits for all ranks on this host; returns their mesh.

    Args:
        names: the names of the abstract Unix sockets on which the ranks on this host listen.
        listener: the socket on which this rank listens.
        deadline: the time on the monotonic clock, in seconds, at which to stop waiting for the other ranks.

    Raises:
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: a rank did not connect in time.
        AuthenticationError: another process answered at a rank's address.
    """
    local = topology.local_ranks
    index = local.index(topology.rank)
    if len(local) == 1:
        return _core.HostMesh.join(0, 1, global_ranks=local)
    key = derive_key(job_secret(), f"{_CHANNEL} {topology.nonce}")
    with contextlib.ExitStack() as cleanup:
        directory = _receive(formation, topology, names, key, deadline) if index else _core.create_directory(len(local))
        cleanup.callback(os.close, directory)
        mesh = _core.HostMesh.join(index, len(local), os.dup(directory), local)
        try:
            children = local[index * FAN_OUT + 1 : (index + 1) * FAN_OUT + 1]
            acceptor = None
            if children:
                send_directory = functools.partial(_send_directory, directory, children)
                acceptor = AuthenticatedListener(listener.dup(), key, _CHANNEL, send_directory)
                cleanup.callback(acceptor.close)
            _await_all(formation, topology, mesh, acceptor, deadline)
        except BaseException:
            mesh.close()
            raise
    return mesh


def _await_all(
    formation: Formation,
    topology: Topology,
    mesh: _core.HostMesh,
    acceptor: AuthenticatedListener | None,
    deadline: float,
) -> None:
    local, members = topology.local_ranks, topology.members
    formation.watch(lambda: next((members[local[index]] for index in mesh.lost()), None))
    while absent := mesh.absent(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        formation.look()
        if acceptor is not None:
            acceptor.require_descriptors()
        if time.monotonic() >= deadline:
            late = and_more([members[local[index]] for index in absent], _MOST_NAMED)
            raise RendezvousTimeoutError(
                f"{members[topology.rank]}: {late} published their addresses and then did not connect in time; look "
                "at their output"
            )


def _send_directory(directory: int, children: tuple[int, ...], connection: Connection, hello: PeerHello) -> None:
    with plain(connection) as child, contextlib.suppress(OSError):  # if the child has died, the mesh reports it
        if is_same_user(child) and hello.rank in children:
            acknowledge(child)
            socket.send_fds(child, [_BYTE], [directory])


def _receive(formation: Formation, topology: Topology, names: Mapping[int, str], key: bytes, deadline: float) -> int:
    """Receives the directory's descriptor from this rank's parent in the tree."""
    local, me = topology.local_ranks, topology.members[topology.rank]
    parent_rank = local[(local.index(topology.rank) - 1) // FAN_OUT]
    try:
        hello = PeerHello(_CHANNEL, topology.rank)
        with plain(dial(functools.partial(_connect, names[parent_rank]), key, hello, deadline)) as parent:
            return _receive_descriptor(formation, parent, deadline)
    except (OSError, HandshakeUnfinishedError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        formation.await_progress()
        raise RendezvousError(
            f"{me}: {topology.members[parent_rank]} does not answer at its Unix socket ({error}); look at its output"
        ) from error


def _receive_descriptor(formation: Formation, parent: socket.socket, deadline: float) -> int:
    parent.settimeout(_LOOK_S)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(parent, len(_BYTE), 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            formation.look()
            if time.monotonic() >= deadline:
                raise
            continue
        if descriptors:
            return descriptors[0]
        if data:  # the kernel drops the descriptor if the process has reached its limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ConnectionResetError("it closed the connection")


def _connect(name: str, left_s: float) -> socket.socket:
    deadline = time.monotonic() + left_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(left_s)
        while True:
            try:
                connection.connect(f"\0{name}")
                return connection
            except BlockingIOError:  # the parent's queue of pending connections is full
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
    except BaseException:
        connection.close()
        raise


MAX_RANKS_OF_HOST = 1024  # must equal kMaxRanks in native/shm/rank_set.hpp


def join(
    formation: Formation, settings: Mapping[str, str | int | None], timeout_s: float
) -> tuple[Topology, _core.HostMesh]:
    """Connects this rank to the other ranks on its host; returns the job's topology and this host's mesh.

    Args:
        settings: the settings that must be the same on all ranks, as a mapping from names to values.
        timeout_s: the time to wait for the other ranks, in seconds.

    Raises:
        RendezvousError: a rank gave up or died, this host has more ranks than can be connected, or the ranks differ in
            version or settings.
        RendezvousTimeoutError: a rank did not publish its address, or did not connect.
        AuthenticationError: another process answered at a rank's address.
    """
    store, rank, world_size = formation.store, formation.rank, formation.world_size
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"paceline-{secrets.token_hex(12)}"
        listener.bind(f"\0{name}")
        listener.listen(2 * FAN_OUT)
        if rank == 0:
            store.set("engine/nonce", secrets.token_hex(16))
        store.set(f"engine/{rank}", describe_rank(host_id=host_id(), socket=name, **settings))
        if late := formation.absent([f"engine/{r}" for r in range(world_size)], deadline):
            named = and_more([f"rank {key.rpartition('/')[2]}" for key in late], _MOST_NAMED)
            raise RendezvousTimeoutError(
                f"rank {rank} waited {timeout_s:.0f} s for {named} to publish an address; look at the output there"
            )
        nonce, *answers = store.multi_get(["engine/nonce", *(f"engine/{r}" for r in range(world_size))])
        members, peers = read_ranks(answers, rank)
        for setting, value in settings.items():
            _require_alike(members, setting, value, [peer.get(setting) for peer in peers], members[rank])

        hosts: dict[str, list[int]] = {}
        for peer, entry in enumerate(peers):
            hosts.setdefault(str(entry["host_id"]), []).append(peer)
        topology = Topology(rank, members, tuple(map(tuple, hosts.values())), nonce.decode())
        local = topology.local_ranks
        if len(local) > MAX_RANKS_OF_HOST:
            raise RendezvousError(
                f"{members[rank]}: {len(local)} ranks are on this host, but at most {MAX_RANKS_OF_HOST} can be "
                "connected on one host"
            )
        names = {r: str(peers[r]["socket"]) for r in local}
        return topology, join_host_mesh(formation, topology, names, listener, deadline)


def _require_alike(
    members: tuple[RankIdentity, ...], setting: str, mine: object, values: list[object], me: RankIdentity
) -> None:
    for member, value in zip(members, values, strict=True):
        if value != mine:
            raise RendezvousError(
                f"{me}: {setting} is {mine!r} here and {value!r} on {member}; it must be the same on all ranks"
            )
