"""Exchanges addresses through the store, derives the topology, and brings the ranks of this host together."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping

from paceline import _core
from paceline.engine.failures import Member
from paceline.engine.formation import Formation
from paceline.engine.introduction import host_id, introduce, read
from paceline.engine.native.handing_down import FAN_OUT, meet_on_host
from paceline.engine.native.topology import Topology
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.wording import and_more

MAX_RANKS_OF_HOST = 1024  # the same as kMaxRanks in native/shm/rank_set.hpp
_MOST_NAMED = 4


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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"paceline-{secrets.token_hex(12)}"
        listener.bind(f"\0{name}")
        listener.listen(2 * FAN_OUT)
        if rank == 0:
            store.set("engine/nonce", secrets.token_hex(16))
        store.set(f"engine/{rank}", introduce(host_id=host_id(), socket=name, **settings))
        if late := formation.absent([f"engine/{r}" for r in range(world_size)], deadline):
            named = and_more([f"rank {key.rpartition('/')[2]}" for key in late], _MOST_NAMED)
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
        return topology, meet_on_host(formation, topology, names, listener, deadline)


def _require_alike(members: tuple[Member, ...], setting: str, mine: object, values: list[object], me: Member) -> None:
    for member, value in zip(members, values, strict=True):
        if value != mine:
            raise RendezvousError(
                f"{me}: {setting} is {mine!r} here and {value!r} on {member}; it must be the same on all ranks"
            )
