"""TCP connections between a group's ranks on different hosts.

A rank listens on one address, only while a group forms, and connects from that same address. Of two ranks, the higher
one connects to the lower one: once for control and messages, and once for each stream of data.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from paceline import _core
from paceline.engine.formation import Formation
from paceline.engine.native.bootstrap import Topology
from paceline.engine.native.congestion import set_congestion_control
from paceline.engine.native.dialing import Arrivals, dial
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.security.doorkeeper import Doorkeeper
from paceline.security.encryption import Connection, for_core
from paceline.security.handshake import HandshakeUnfinishedError, Hello
from paceline.security.secret import derive_key, job_secret
from paceline.store.tcp import listen

_CHANNEL = "links"
_LOOK_S = 0.5

Connections = list[list[int | _core.TlsConnection]]


def connect(
    formation: Formation,
    topology: Topology,
    ranks: Sequence[int],
    number: int,
    address: str,
    streams: int,
    timeout_s: float,
) -> Connections:
    """Returns this rank's connections to each of the group's `ranks`, by group rank; none to those of its own host.

    Args:
        number: the group's number, which is the same on all its members and new for each group.
        address: the address to listen on and to connect from.
        streams: the number of connections for data, in addition to the one for control.
        timeout_s: how long to wait for the other ranks, in seconds.

    Raises:
        ValueError: the job has no secret, although `address` can be reached from other machines.
        RendezvousError: a rank gave up or died, or its address cannot be reached.
        RendezvousTimeoutError: a rank did not open the group or connect; the message names it.
        AuthenticationError: another process answered at a rank's address.
    """
    deadline = time.monotonic() + timeout_s
    me = topology.members[topology.rank]
    remote = [peer for peer in ranks if peer not in topology.local_ranks]
    secret = job_secret()
    key = derive_key(secret, f"{_CHANNEL} {topology.nonce}")
    arrivals = Arrivals()
    doorkeeper = Doorkeeper(listen(address, 0, secret), key, _CHANNEL, arrivals.admit, number, secret)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(arrivals.close)
        cleanup.callback(doorkeeper.close)
        store = formation.store
        store.set(_key(number, topology.rank), f"{address} {doorkeeper.port}")
        keys = {_key(number, peer): peer for peer in remote}
        if late := formation.absent(list(keys), deadline):
            raise RendezvousTimeoutError(
                f"{me}: {', '.join(str(topology.members[keys[key]]) for key in late)} did not open this group within "
                f"{timeout_s:.0f} s; look at their output. All ranks, members or not, call new_group with the same "
                "arguments and in the same order"
            )
        found: dict[tuple[int, int], Connection] = {}
        for peer in remote:
            if peer > topology.rank:
                continue
            host, port = store.get(_key(number, peer)).decode().split()
            for lane in range(1 + streams):
                try:
                    hello = Hello(_CHANNEL, topology.rank, number, lane)
                    connection = _dial(host, int(port), address, key, hello, deadline, secret)
                except (OSError, HandshakeUnfinishedError) as error:
                    formation.await_news()
                    raise RendezvousError(
                        f"{me}: {topology.members[peer]} at {host}:{port} cannot be reached from {address} ({error}); "
                        "check the route and the firewall between the hosts, or choose an interface with PACELINE_IFACE"
                    ) from error
                cleanup.enter_context(connection)
                found[peer, lane] = connection
        expected = {(peer, lane) for peer in remote for lane in range(1 + streams)}
        while missing := expected - found.keys():
            left_s = max(0.05, deadline - time.monotonic())
            arrived = arrivals.take(min(left_s, _LOOK_S))
            if arrived is None:
                formation.look()
                doorkeeper.require_descriptors()
                if left_s > _LOOK_S:
                    continue
                absent = sorted({peer for peer, _ in missing})
                raise RendezvousTimeoutError(
                    f"{me}: {', '.join(str(topology.members[peer]) for peer in absent)} did not connect to {address} "
                    f"within {timeout_s:.0f} s; look at their output"
                )
            who, connection = arrived
            cleanup.enter_context(connection)
            if who.rank > topology.rank and (who.rank, who.lane) in expected:
                found[who.rank, who.lane] = connection  # the latest one counts: the peer has given up the others
        for connection in found.values():
            set_congestion_control(connection)
        lanes = range(1 + streams)
        return [[for_core(found[peer, lane]) for lane in lanes] if peer in remote else [] for peer in ranks]


def _dial(
    host: str, port: int, source: str, key: bytes, hello: Hello, deadline: float, secret: bytes | None
) -> Connection:
    def connected(left_s: float) -> socket.socket:
        return socket.create_connection((host, port), timeout=left_s, source_address=(source, 0))

    return dial(connected, key, hello, deadline, secret)


def _key(number: int, rank: int) -> str:
    return f"links/{number}/{rank}"
