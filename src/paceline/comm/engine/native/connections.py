"""TCP connections between ranks in the same group on different hosts.

A rank listens on one address, and only while a group forms; it also connects from this address. Of two ranks, the one
with the higher number connects to the other: once for control and messages, and once per data stream. In a job with a
single port, a machine may be unable to accept connections. A rank that cannot connect to such a machine requests,
through the store, a connection in the opposite direction.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline import _core
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation
from paceline.comm.engine.native.bootstrap import AcceptedConnections, Topology, dial
from paceline.comm.engine.network_settings import set_congestion_control
from paceline.comm.one_port.dialer import chosen_port, silent_hosts
from paceline.comm.one_port.dialer import dial as dial_machine
from paceline.comm.security.authenticated_listener import AuthenticatedListener
from paceline.comm.security.encryption import Connection, release_to_core
from paceline.comm.security.handshake import HandshakeUnfinishedError, PeerHello
from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.store.store import Store
from paceline.comm.store.tcp_store import listen
from paceline.errors import RendezvousError, RendezvousTimeoutError, and_more


class ReverseConnectRequests:
    """Requests for connections in the opposite direction, exchanged through the store while a group forms.

    `number` is the group's number.
    """

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self._rank = store, number, rank

    def request(self, peer: int, why: str) -> None:
        """Requests that a peer connect to this rank; `why` is the reason why this rank cannot connect to the peer."""
        self._store.set(f"{self._key(peer)}/{self._rank}", why)
        self._store.set(self._key(peer), b"")

    def requesters(self, among: Iterable[int]) -> dict[int, str]:
        """Returns the ranks in `among` that request a connection from this rank, with their reasons."""
        key = self._key(self._rank)
        if not self._store.check([key]):  # fast path: usually there are no requests
            return {}
        return {
            peer: self._store.get(f"{key}/{peer}").decode()
            for peer in sorted(among)
            if self._store.check([f"{key}/{peer}"])
        }

    def _key(self, rank: int) -> str:
        return f"links/{self._number}/calls/{rank}"


_CHANNEL = "links"
_LOOK_S = 0.5
# Timeouts for connecting to a machine with a single port. The first one allows the kernel two attempts before a
# connection in the opposite direction is requested. The second one allows four attempts, and applies if this direction
# is the last resort.
_REACH_S, _LAST_REACH_S = 1.5, 10.0
_MOST_NAMED = 4

Connections = list[list[int | _core.TlsConnection]]


def connect(
    formation: Formation,
    topology: Topology,
    ranks: Sequence[int],
    number: int,
    address: str,
    streams: int,
    timeout_s: float,
    closed: set[str],
) -> Connections:
    """Connects this rank to the group's ranks on other hosts; returns a list of connections for each group rank.

    Args:
        number: the group's number, which is the same on all its members and new for each group.
        address: the address to listen on and to connect from.
        streams: the number of connections for data, in addition to the control connection.
        timeout_s: the time to wait for the other ranks, in seconds.
        closed: the addresses of machines that are known not to accept connections; newly detected ones are added.

    Raises:
        ValueError: the job has no secret, although `address` can be reached from other machines.
        RendezvousError: a rank gave up or died, or its address cannot be reached.
        RendezvousTimeoutError: a rank did not open the group or did not connect; the message identifies the rank.
        AuthenticationError: another process answered at a rank's address.
    """
    deadline = time.monotonic() + timeout_s
    me = topology.members[topology.rank]
    remote = [peer for peer in ranks if peer not in topology.local_ranks]
    secret = job_secret()
    key = derive_key(secret, f"{_CHANNEL} {topology.nonce}")
    accepted = AcceptedConnections()
    acceptor = AuthenticatedListener(listen(address, 0, secret), key, _CHANNEL, accepted.admit, number, secret)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(accepted.close)
        cleanup.callback(acceptor.close)
        store = formation.store
        store.set(_key(number, topology.rank), f"{address} {acceptor.port}")
        keys = {_key(number, peer): peer for peer in remote}
        if late := formation.absent(list(keys), deadline):
            raise RendezvousTimeoutError(
                f"{me}: {and_more([topology.members[keys[key]] for key in late], _MOST_NAMED)} did not open this group "
                f"within {timeout_s:.0f} s; look at their output. All ranks, members or not, call new_group with the "
                "same arguments and in the same order"
            )
        addresses = {peer: _parse_address(store.get(_key(number, peer))) for peer in remote}
        own_end = _OwnEnd(topology.rank, number, address, key, secret, deadline)
        links = _Links(formation, topology.members, own_end, addresses, range(1 + streams), closed, cleanup)
        lower = [peer for peer in remote if peer < topology.rank]
        links.find_silent(lower)
        for peer in lower:
            links.dial(peer)
        links.gather(accepted, acceptor, timeout_s)
        for connection in links.found.values():
            set_congestion_control(connection)
        lanes = range(1 + streams)
        return [
            [release_to_core(links.found[peer, lane]) for lane in lanes] if peer in remote else [] for peer in ranks
        ]


@dataclass(frozen=True)
class _OwnEnd:
    """This rank's end of the connections; `number` is the group's number."""

    rank: int
    number: int
    address: str
    key: bytes
    secret: bytes | None
    deadline: float


@dataclass
class _Links:
    """The connections of this rank while a group forms; `cleanup` closes them if the formation fails.

    Attributes:
        own_end: this rank's end.
        addresses: the addresses and ports on which the ranks on other hosts listen.
        lanes: the indices of the connections to each peer.
        closed: the addresses of machines that are known not to accept connections.
        found: the connections by peer and lane.
        requested: the peers from which this rank has requested a connection.
    """

    formation: Formation
    members: Sequence[RankIdentity]
    own_end: _OwnEnd
    addresses: dict[int, tuple[str, int]]
    lanes: range
    closed: set[str]
    cleanup: contextlib.ExitStack
    found: dict[tuple[int, int], Connection] = field(default_factory=dict)
    requested: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._port = chosen_port()
        self._requests = ReverseConnectRequests(self.formation.store, self.own_end.number, self.own_end.rank)

    def find_silent(self, peers: Iterable[int]) -> None:
        """Tests concurrently whether the peers' hosts accept connections on the single port.

        Testing hosts one by one would take `_REACH_S` for each host that drops packets.
        """
        hosts = {self.addresses[peer][0] for peer in peers} - self.closed
        if self._port is not None and len(hosts) > 1:
            self.closed |= silent_hosts(hosts, self.own_end.address, _REACH_S)

    def dial(self, peer: int, peer_failed: str | None = None) -> None:
        """Connects to a peer. If this fails in a job with a single port, requests a connection from the peer.

        Args:
            peer: the rank to connect to.
            peer_failed: the reason why the peer cannot connect to this rank, if the peer requested the connection.

        Raises:
            RendezvousError: the peer cannot be reached.
        """
        host, port = self.addresses[peer]
        own_end = self.own_end
        if peer_failed is None and host in self.closed:
            self._request(peer, f"{host} did not accept a connection")
            return
        try:
            for lane in self.lanes:
                hello = PeerHello(_CHANNEL, own_end.rank, own_end.number, lane)
                connection = _dial(host, port, own_end, hello, self._reach_s(peer_failed is not None))
                self.cleanup.enter_context(connection)
                self.found[peer, lane] = connection
        except (OSError, HandshakeUnfinishedError) as error:
            self.formation.await_progress()
            if self._port is not None and peer_failed is None:
                self.closed.add(host)
                self._request(peer, str(error))
                return
            raise RendezvousError(self._unreachable(peer, error, peer_failed)) from error

    def gather(self, accepted: AcceptedConnections, acceptor: AuthenticatedListener, timeout_s: float) -> None:
        """Waits for connections from the peers that are expected to connect to this rank.

        Raises:
            RendezvousError: a rank gave up or died, or a peer and this rank cannot reach each other.
            RendezvousTimeoutError: a peer did not connect.
        """
        rank = self.own_end.rank
        expected = {(peer, lane) for peer in self.addresses for lane in self.lanes}
        while missing := expected - self.found.keys():
            left_s = max(0.05, self.own_end.deadline - time.monotonic())
            arrived = accepted.take(min(left_s, _LOOK_S))
            if arrived is None:
                self.formation.look()
                acceptor.require_descriptors()
                self._answer_requests({peer for peer, _ in missing if peer > rank})
                if left_s > _LOOK_S:
                    continue
                absent = [self.members[peer] for peer in sorted({peer for peer, _ in missing})]
                raise RendezvousTimeoutError(
                    f"{self.members[rank]}: {and_more(absent, _MOST_NAMED)} did not connect to {self.own_end.address} "
                    f"within {timeout_s:.0f} s; look at their output"
                )
            hello, connection = arrived
            self.cleanup.enter_context(connection)
            if (hello.rank > rank or hello.rank in self.requested) and (hello.rank, hello.lane) in expected:
                self.found[hello.rank, hello.lane] = connection  # replaces connections that the peer has abandoned

    def _reach_s(self, is_last: bool) -> float | None:
        if self._port is None:
            return None
        return _LAST_REACH_S if is_last else _REACH_S

    def _request(self, peer: int, why: str) -> None:
        self._drop(peer)
        self.requested.add(peer)
        self._requests.request(peer, why)

    def _answer_requests(self, peers: Iterable[int]) -> None:
        """Connects to peers that have requested a connection because they cannot connect to this rank."""
        if self._port is not None:
            for peer, why in self._requests.requesters(peers).items():
                self._drop(peer)
                self.dial(peer, why)

    def _drop(self, peer: int) -> None:
        """Closes an incomplete set of connections to a peer."""
        for lane in self.lanes:
            if (connection := self.found.pop((peer, lane), None)) is not None:
                connection.close()

    def _unreachable(self, peer: int, error: Exception, peer_failed: str | None) -> str:
        host, port = self.addresses[peer]
        me, other, address = self.members[self.own_end.rank], self.members[peer], self.own_end.address
        if peer_failed is None:
            return (
                f"{me}: {other} at {host}:{port} cannot be reached from {address} ({error}); check the route "
                "and the firewall between the hosts, or choose an interface with PACELINE_IFACE"
            )
        return (
            f"{me}: {other} and this rank cannot connect to each other: {other} has tried {address}, port "
            f"{self._port} ({peer_failed}), and this rank has tried {host}, port {self._port} ({error}). One of the "
            f"two machines must accept TCP connections at port {self._port} from the other: open it in the firewall "
            "there, or choose an interface with PACELINE_IFACE"
        )


def _dial(host: str, port: int, own_end: _OwnEnd, hello: PeerHello, reach_s: float | None) -> Connection:
    def connected(left_s: float) -> socket.socket:
        return dial_machine((host, port), left_s, own_end.address, reach_s)

    return dial(connected, own_end.key, hello, own_end.deadline, own_end.secret)


def _parse_address(text: bytes) -> tuple[str, int]:
    host, port = text.decode().split()
    return host, int(port)


def _key(number: int, rank: int) -> str:
    return f"links/{number}/{rank}"
