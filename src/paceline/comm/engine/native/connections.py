"""TCP connections between a group's ranks on different hosts.

A rank listens on one address, only while a group forms, and connects from that same address. Of two ranks, the higher
one connects to the lower one: once for control and messages, and once for each stream of data. In a job with one port
it may be that a machine accepts no connections there; then the lower rank is asked to connect to the higher one.

Where one of two machines cannot connect to the other, it asks to be connected to: by a note in the store.
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
from paceline.comm.engine.native.bootstrap import Topology
from paceline.comm.engine.native.dial import AcceptedConnections, dial
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
    """The notes that the ranks of one group leave for each other while it forms.

    Args:
        store: the store of the group.
        number: the group's number.
        rank: this rank.
    """

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self._rank = store, number, rank

    def call(self, peer: int, why: str) -> None:
        """Asks a peer to connect to this rank, and says why this rank cannot connect to the peer."""
        self._store.set(f"{self._place(peer)}/{self._rank}", why)
        self._store.set(self._place(peer), b"")

    def callers(self, among: Iterable[int]) -> dict[int, str]:
        """Returns those of the ranks that ask this one to connect to them, with their reasons."""
        place = self._place(self._rank)
        if not self._store.check([place]):  # most of the time, one question is enough
            return {}
        return {
            peer: self._store.get(f"{place}/{peer}").decode()
            for peer in sorted(among)
            if self._store.check([f"{place}/{peer}"])
        }

    def _place(self, rank: int) -> str:
        return f"links/{self._number}/calls/{rank}"


_CHANNEL = "links"
_LOOK_S = 0.5
# How long a machine with one port has to accept a connection. The kernel makes two attempts before the other rank is
# asked to connect, which costs little if they are lost, and four of those that there is no other way for.
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
    """Returns this rank's connections to each of the group's `ranks`, by group rank; none to those of its own host.

    Args:
        formation: that of the group.
        topology: all ranks of the job.
        ranks: those of the group.
        number: the group's number, which is the same on all its members and new for each group.
        address: the address to listen on and to connect from.
        streams: the number of connections for data, in addition to the one for control.
        timeout_s: how long to wait for the other ranks, in seconds.
        closed: the addresses of machines that were found to accept no connection; others are added.

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
    arrivals = AcceptedConnections()
    doorkeeper = AuthenticatedListener(listen(address, 0, secret), key, _CHANNEL, arrivals.admit, number, secret)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(arrivals.close)
        cleanup.callback(doorkeeper.close)
        store = formation.store
        store.set(_key(number, topology.rank), f"{address} {doorkeeper.port}")
        keys = {_key(number, peer): peer for peer in remote}
        if late := formation.absent(list(keys), deadline):
            raise RendezvousTimeoutError(
                f"{me}: {and_more([topology.members[keys[key]] for key in late], _MOST_NAMED)} did not open this group "
                f"within {timeout_s:.0f} s; look at their output. All ranks, members or not, call new_group with the "
                "same arguments and in the same order"
            )
        places = {peer: _place(store.get(_key(number, peer))) for peer in remote}
        mine = _Me(topology.rank, number, address, key, secret, deadline)
        links = _Links(formation, topology.members, mine, places, range(1 + streams), closed, cleanup)
        lower = [peer for peer in remote if peer < topology.rank]
        links.find_silent(lower)
        for peer in lower:
            links.dial(peer)
        links.gather(arrivals, doorkeeper, timeout_s)
        for connection in links.found.values():
            set_congestion_control(connection)
        lanes = range(1 + streams)
        return [
            [release_to_core(links.found[peer, lane]) for lane in lanes] if peer in remote else [] for peer in ranks
        ]


@dataclass(frozen=True)
class _Me:
    """What this rank connects with."""

    rank: int
    number: int  # of the group
    address: str
    key: bytes
    secret: bytes | None
    deadline: float


@dataclass
class _Links:
    """The connections of a rank while its group forms; `cleanup` closes them, should it fail."""

    formation: Formation
    members: Sequence[RankIdentity]
    me: _Me
    places: dict[int, tuple[str, int]]  # where the ranks of other hosts listen
    lanes: range
    closed: set[str]
    cleanup: contextlib.ExitStack
    found: dict[tuple[int, int], Connection] = field(default_factory=dict)
    called: set[int] = field(default_factory=set)  # ranks that were asked to connect to this one

    def __post_init__(self) -> None:
        self._port = chosen_port()
        self._calls = ReverseConnectRequests(self.formation.store, self.me.number, self.me.rank)

    def find_silent(self, peers: Iterable[int]) -> None:
        """Asks the peers' hosts all at once whether they accept connections at the one port.

        Each that drops what it gets would cost `_REACH_S` if it were only found when it is dialled.
        """
        hosts = {self.places[peer][0] for peer in peers} - self.closed
        if self._port is not None and len(hosts) > 1:
            self.closed |= silent_hosts(hosts, self.me.address, _REACH_S)

    def dial(self, peer: int, calls_because: str | None = None) -> None:
        """Connects to a peer; in a job with one port, asks it to connect if that does not go, unless it has asked.

        Raises:
            RendezvousError: it cannot be reached.
        """
        host, port = self.places[peer]
        me = self.me
        if calls_because is None and host in self.closed:
            self._call(peer, f"{host} accepted no connection")
            return
        try:
            for lane in self.lanes:
                hello = PeerHello(_CHANNEL, me.rank, me.number, lane)
                connection = _dial(host, port, me, hello, self._reach_s(calls_because is not None))
                self.cleanup.enter_context(connection)
                self.found[peer, lane] = connection
        except (OSError, HandshakeUnfinishedError) as error:
            self.formation.await_news()
            if self._port is not None and calls_because is None:
                self.closed.add(host)
                self._call(peer, str(error))
                return
            raise RendezvousError(self._unreachable(peer, error, calls_because)) from error

    def gather(self, arrivals: AcceptedConnections, doorkeeper: AuthenticatedListener, timeout_s: float) -> None:
        """Waits for the connections of the peers that connect to this rank.

        Raises:
            RendezvousError: a rank gave up or died, or a peer and this rank cannot reach each other.
            RendezvousTimeoutError: a peer did not connect.
        """
        rank = self.me.rank
        expected = {(peer, lane) for peer in self.places for lane in self.lanes}
        while missing := expected - self.found.keys():
            left_s = max(0.05, self.me.deadline - time.monotonic())
            arrived = arrivals.take(min(left_s, _LOOK_S))
            if arrived is None:
                self.formation.look()
                doorkeeper.require_descriptors()
                self._answer_calls({peer for peer, _ in missing if peer > rank})
                if left_s > _LOOK_S:
                    continue
                absent = [self.members[peer] for peer in sorted({peer for peer, _ in missing})]
                raise RendezvousTimeoutError(
                    f"{self.members[rank]}: {and_more(absent, _MOST_NAMED)} did not connect to {self.me.address} "
                    f"within {timeout_s:.0f} s; look at their output"
                )
            who, connection = arrived
            self.cleanup.enter_context(connection)
            if (who.rank > rank or who.rank in self.called) and (who.rank, who.lane) in expected:
                self.found[who.rank, who.lane] = connection  # the latest one counts: the peer has given up the others

    def _reach_s(self, is_last: bool) -> float | None:
        if self._port is None:
            return None
        return _LAST_REACH_S if is_last else _REACH_S

    def _call(self, peer: int, why: str) -> None:
        self._drop(peer)
        self.called.add(peer)
        self._calls.call(peer, why)

    def _answer_calls(self, peers: Iterable[int]) -> None:
        """Connects to those of the peers that cannot connect to this rank."""
        if self._port is not None:
            for peer, why in self._calls.callers(peers).items():
                self._drop(peer)
                self.dial(peer, why)

    def _drop(self, peer: int) -> None:
        """Forgets the connections to a peer, which are too few; they are closed at the latest when this rank ends."""
        for lane in self.lanes:
            if (connection := self.found.pop((peer, lane), None)) is not None:
                connection.close()

    def _unreachable(self, peer: int, error: Exception, calls_because: str | None) -> str:
        host, port = self.places[peer]
        me, other = self.members[self.me.rank], self.members[peer]
        if calls_because is None:
            return (
                f"{me}: {other} at {host}:{port} cannot be reached from {self.me.address} ({error}); check the route "
                "and the firewall between the hosts, or choose an interface with PACELINE_IFACE"
            )
        return (
            f"{me}: {other} and this rank cannot connect to each other: {other} has tried {self.me.address}, port "
            f"{self._port} ({calls_because}), and this rank has tried {host}, port {self._port} ({error}). One of the "
            f"two machines must accept TCP connections at port {self._port} from the other: open it in the firewall "
            "there, or choose an interface with PACELINE_IFACE"
        )


def _dial(host: str, port: int, me: _Me, hello: PeerHello, reach_s: float | None) -> Connection:
    def connected(left_s: float) -> socket.socket:
        return dial_machine((host, port), left_s, me.address, reach_s)

    return dial(connected, me.key, hello, me.deadline, me.secret)


def _place(told: bytes) -> tuple[str, int]:
    host, port = told.decode().split()
    return host, int(port)


def _key(number: int, rank: int) -> str:
    return f"links/{number}/{rank}"
