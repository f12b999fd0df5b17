"""Brings the ranks of a host together: the first one makes their board, and each hands it down to some others.

The board is memory that tells each rank of all others (native/shm/board.hpp). Its descriptor goes down a tree, each of
whose connections both ends authenticate as the others of the job do, so whoever has the board has proved the secret; a
rank makes one connection and accepts `FAN_OUT` at most, however many ranks there are.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from collections.abc import Mapping

from paceline import _core
from paceline.engine.formation import Formation
from paceline.engine.native.dialing import dial, welcome
from paceline.engine.native.topology import Topology
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.security.doorkeeper import Doorkeeper
from paceline.security.encryption import Connection, plain
from paceline.security.handshake import HandshakeUnfinishedError, Hello
from paceline.security.peers import is_same_user
from paceline.security.secret import derive_key, job_secret
from paceline.wording import and_more

FAN_OUT = 16
_CHANNEL = "board"
_HERE = b"\x01"  # a message needs a byte beside its descriptor
_LOOK_S = 0.5
_PAUSE_S = 0.005
_MOST_NAMED = 4


def meet_on_host(
    formation: Formation, topology: Topology, names: Mapping[int, str], listener: socket.socket, deadline: float
) -> _core.Mesh:
    """Returns the mesh of this host's ranks, once all of them have come.

    Args:
        formation: the default group's formation.
        topology: the ranks and their hosts.
        names: the abstract Unix sockets on which the ranks of this host listen.
        listener: that of this rank.
        deadline: the time of the monotonic clock, in seconds, until which the others may come.

    Raises:
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: a rank did not come.
        AuthenticationError: another process answered at a rank's address.
    """
    local = topology.local_ranks
    place = local.index(topology.rank)
    if len(local) == 1:
        return _core.Mesh.join(0, 1, names=local)
    key = derive_key(job_secret(), f"{_CHANNEL} {topology.nonce}")
    with contextlib.ExitStack() as cleanup:
        board = _receive(formation, topology, names, key, deadline) if place else _core.create_board(len(local))
        cleanup.callback(os.close, board)
        mesh = _core.Mesh.join(place, len(local), os.dup(board), local)
        try:
            below = local[place * FAN_OUT + 1 : (place + 1) * FAN_OUT + 1]
            doorkeeper = None
            if below:
                doorkeeper = Doorkeeper(listener.dup(), key, _CHANNEL, functools.partial(_hand_down, board, below))
                cleanup.callback(doorkeeper.close)
            _await_all(formation, topology, mesh, doorkeeper, deadline)
        except BaseException:
            mesh.close()
            raise
    return mesh


def _await_all(
    formation: Formation, topology: Topology, mesh: _core.Mesh, doorkeeper: Doorkeeper | None, deadline: float
) -> None:
    local, members = topology.local_ranks, topology.members
    formation.watch(lambda: next((members[local[place]] for place in mesh.lost()), None))
    while absent := mesh.absent(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        formation.look()
        if doorkeeper is not None:
            doorkeeper.require_descriptors()
        if time.monotonic() >= deadline:
            late = and_more([members[local[place]] for place in absent], _MOST_NAMED)
            raise RendezvousTimeoutError(
                f"{members[topology.rank]}: {late} published their addresses and then did not connect in time; look "
                "at their output"
            )


def _hand_down(board: int, below: tuple[int, ...], connection: Connection, hello: Hello) -> None:
    with plain(connection) as child, contextlib.suppress(OSError):  # a child that has gone is missed elsewhere
        if is_same_user(child) and hello.rank in below:
            welcome(child)
            socket.send_fds(child, [_HERE], [board])


def _receive(formation: Formation, topology: Topology, names: Mapping[int, str], key: bytes, deadline: float) -> int:
    """Returns the descriptor of the board, from the rank above this one in the tree."""
    local, me = topology.local_ranks, topology.members[topology.rank]
    above = local[(local.index(topology.rank) - 1) // FAN_OUT]
    try:
        hello = Hello(_CHANNEL, topology.rank)
        with plain(dial(functools.partial(_reach, names[above]), key, hello, deadline)) as parent:
            return _take(formation, parent, deadline)
    except (OSError, HandshakeUnfinishedError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        formation.await_news()
        raise RendezvousError(
            f"{me}: {topology.members[above]} does not answer at its Unix socket ({error}); look at its output"
        ) from error


def _take(formation: Formation, parent: socket.socket, deadline: float) -> int:
    parent.settimeout(_LOOK_S)
    while True:
        try:
            said, descriptors, _, _ = socket.recv_fds(parent, len(_HERE), 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            formation.look()
            if time.monotonic() >= deadline:
                raise
            continue
        if descriptors:
            return descriptors[0]
        if said:  # the kernel drops a descriptor for which the process has no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ConnectionResetError("it closed the connection")


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
