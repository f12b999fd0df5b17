"""Joins the ranks of one host: from a store to a mesh of authenticated Unix sockets."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from paceline import _core
from paceline.engine.failures import Member
from paceline.errors import AuthenticationError, RendezvousError
from paceline.security.handshake import Hello, prove, verify
from paceline.security.secret import derive_key, job_secret
from paceline.store.base import Store

MAX_RANKS = 64
_CHANNEL = "mesh"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class HostMesh:
    """The joined ranks; `members[r]` is rank r of the default group."""

    mesh: _core.Mesh
    members: tuple[Member, ...]


def host_id() -> str:
    """The same for all processes that reach each other's abstract Unix sockets, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def join_host(store: Store, rank: int, world_size: int, timeout_s: float) -> HostMesh:
    """Connects this rank with every other.

    Raises:
        ValueError: more ranks than the engine connects.
        RendezvousError: the ranks are on several hosts.
        AuthenticationError: another process answered at a rank's address.
        StoreTimeoutError: a rank did not publish its address.
    """
    if world_size > MAX_RANKS:
        raise ValueError(f"world_size is {world_size}; on one host at most {MAX_RANKS} ranks are connected")
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"paceline-{secrets.token_hex(12)}"
        listener.bind(f"\0{name}")
        listener.listen(MAX_RANKS)
        if rank == 0:
            store.set("engine/nonce", secrets.token_hex(16))
        me = {"host_id": host_id(), "host": socket.gethostname(), "pid": os.getpid(), "socket": name}
        store.set(f"engine/{rank}", json.dumps(me))
        store.wait([f"engine/{r}" for r in range(world_size)], timedelta(seconds=timeout_s))
        nonce, *answers = store.multi_get(["engine/nonce", *(f"engine/{r}" for r in range(world_size))])
        peers = [json.loads(answer) for answer in answers]
        _require_one_host(rank, peers)

        key = derive_key(job_secret(), f"{_CHANNEL} {nonce.decode()}")
        connections: dict[int, socket.socket] = {}
        for peer in range(rank):
            connection = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(f"\0{peers[peer]['socket']}")
            prove(connection, key, Hello(_CHANNEL, rank), max(0.1, deadline - time.monotonic()))
            connections[peer] = connection
        while len(connections) < world_size - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection = cleanup.enter_context(listener.accept()[0])
            except TimeoutError:
                absent = [r for r in range(rank + 1, world_size) if r not in connections]
                raise RendezvousError(
                    f"rank {rank}: ranks {absent} published their addresses and then did not connect within "
                    f"{timeout_s:.0f} s; look at their output"
                ) from None
            if not _same_user(connection):
                continue
            with contextlib.suppress(AuthenticationError):
                hello = verify(connection, key, _CHANNEL, timeout_s=max(0.1, min(5.0, deadline - time.monotonic())))
                if rank < hello.rank < world_size and hello.rank not in connections:
                    connections[hello.rank] = connection
        for connection in connections.values():
            connection.setblocking(True)
        sockets = [-1 if peer == rank else connections[peer].detach() for peer in range(world_size)]
    members = tuple(Member(r, peer["host"], peer["pid"]) for r, peer in enumerate(peers))
    return HostMesh(_core.Mesh(rank, sockets), members)


def _require_one_host(rank: int, peers: list[dict[str, str]]) -> None:
    hosts: dict[str, list[int]] = {}
    for peer, entry in enumerate(peers):
        hosts.setdefault(entry["host_id"], []).append(peer)
    if len(hosts) > 1:
        told = "; ".join(f"{peers[ranks[0]]['host']} has ranks {ranks}" for ranks in hosts.values())
        raise RendezvousError(
            f"rank {rank}: the ranks are on {len(hosts)} hosts (or in containers with networks of their own): {told}. "
            "This version's engine joins the ranks of one host; start all of them there"
        )


def _same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.getuid())
