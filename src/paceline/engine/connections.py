"""TCP connections between a group's ranks on different hosts.

A rank listens only while a group forms, on one address, and connects from that same address. Between two ranks the
higher connects to the lower: once for control and messages, and once for each stream of data.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Sequence

from paceline.durations import for_socket
from paceline.engine.bootstrap import Topology
from paceline.engine.congestion import set_congestion_control
from paceline.engine.formation import Formation
from paceline.errors import RendezvousError, RendezvousTimeoutError
from paceline.security.doorkeeper import Doorkeeper
from paceline.security.handshake import HandshakeUnfinishedError, Hello, prove
from paceline.security.secret import derive_key, job_secret
from paceline.store.tcp import listen

_CHANNEL = "links"
_WELCOME = b"\x01"
_LOOK_S = 0.5
_NEWS_COMES_S = 0.5  # of a rank that does not answer

Sockets = list[list[int]]


def connect(
    formation: Formation,
    topology: Topology,
    ranks: Sequence[int],
    number: int,
    address: str,
    streams: int,
    timeout_s: float,
) -> Sockets:
    """This rank's connections to each of the group's `ranks`, by group rank; none to those of its own host.

    Args:
        number: of the group, the same on its members and new for each group.
        address: to listen on and to connect from.
        streams: connections for data, beside the one for control.

    Raises:
        ValueError: the job has no secret, and `address` can be reached from other machines.
        RendezvousError: a rank gave up or died, or its address cannot be reached.
        RendezvousTimeoutError: a rank did not come; the message names it.
        AuthenticationError: another process answered at a rank's address.
    """
    deadline = time.monotonic() + timeout_s
    me = topology.members[topology.rank]
    remote = [peer for peer in ranks if peer not in topology.local_ranks]
    key = derive_key(job_secret(), f"{_CHANNEL} {topology.nonce}")
    arrived: queue.SimpleQueue[tuple[Hello, socket.socket]] = queue.SimpleQueue()

    def admit(connection: socket.socket, hello: Hello) -> None:
        connection.sendall(_WELCOME)
        arrived.put((hello, connection))

    doorkeeper = Doorkeeper(
        listen(address, 0, job_secret()),
        key,
        _CHANNEL,
        admit,
        number,
    )
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_close_all, arrived)
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
        found: dict[tuple[int, int], socket.socket] = {}
        for peer in remote:
            if peer > topology.rank:
                continue
            host, port = store.get(_key(number, peer)).decode().split()
            for lane in range(1 + streams):
                try:
                    connection = _dial(
                        host, int(port), address, key, Hello(_CHANNEL, topology.rank, number, lane), deadline
                    )
                except (OSError, HandshakeUnfinishedError) as error:
                    formation.look(_NEWS_COMES_S)
                    raise RendezvousError(
                        f"{me}: {topology.members[peer]} at {host}:{port} cannot be reached from {address} ({error}); "
                        "check the route and the firewall between the hosts, or choose an interface with PACELINE_IFACE"
                    ) from error
                found[peer, lane] = cleanup.enter_context(connection)
        expected = {(peer, lane) for peer in remote for lane in range(1 + streams)}
        while missing := expected - found.keys():
            left_s = max(0.05, deadline - time.monotonic())
            try:
                hello, connection = arrived.get(timeout=min(left_s, _LOOK_S))
            except queue.Empty:
                formation.look()
                if left_s > _LOOK_S:
                    continue
                absent = sorted({peer for peer, _ in missing})
                raise RendezvousTimeoutError(
                    f"{me}: {', '.join(str(topology.members[peer]) for peer in absent)} did not connect to {address} "
                    f"within {timeout_s:.0f} s; look at their output"
                ) from None
            cleanup.enter_context(connection)
            if hello.rank > topology.rank and (hello.rank, hello.lane) in expected:
                found[hello.rank, hello.lane] = connection  # the latest: it gave up those before
        for connection in found.values():
            set_congestion_control(connection)
        return [[found[peer, lane].detach() for lane in range(1 + streams)] if peer in remote else [] for peer in ranks]


def _dial(host: str, port: int, source: str, key: bytes, hello: Hello, deadline: float) -> socket.socket:
    while True:
        left_s = for_socket(deadline - time.monotonic())
        connection = socket.create_connection((host, port), timeout=left_s, source_address=(source, 0))
        try:
            prove(connection, key, hello, left_s)
            _await_welcome(connection, left_s)
            connection.settimeout(None)
            return connection
        except HandshakeUnfinishedError:
            # The other end may have been too busy with strangers to answer in time.
            connection.close()
            if time.monotonic() >= deadline:
                raise
        except BaseException:
            connection.close()
            raise


def _await_welcome(connection: socket.socket, timeout_s: float) -> None:
    """A crowd of strangers can push this connection out after its proof was sent and before it was read."""
    connection.settimeout(timeout_s)
    try:
        if connection.recv(1) == _WELCOME:
            return
    except OSError:
        pass
    raise HandshakeUnfinishedError("the other end closed the connection before it had read the proof")


def _close_all(arrived: queue.SimpleQueue[tuple[Hello, socket.socket]]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            arrived.get_nowait()[1].close()


def _key(number: int, rank: int) -> str:
    return f"links/{number}/{rank}"
