"""Store over TCP: one rank serves it, and all ranks connect to it.

`StoreServer` accepts clients that prove knowledge of the job's secret, and passes their connections to the core's
server.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from paceline import _core
from paceline.comm.one_port.dialer import chosen_port, dial_with_secret, resolver_name
from paceline.comm.security.authenticated_listener import AuthenticatedListener, ListeningEndpoint
from paceline.comm.security.encryption import Connection, release_to_core
from paceline.comm.security.handshake import PeerHello
from paceline.comm.security.secret import derive_key, is_loopback, job_secret, require_secret
from paceline.comm.store.remote_store import CHANNEL, RemoteStore, connect
from paceline.comm.store.store import DEFAULT_TIMEOUT
from paceline.durations import Timeout, to_seconds
from paceline.errors import RendezvousTimeoutError, StoreConnectionError, StoreTimeoutError

BACKLOG = 1024  # the number of connections that may wait to be accepted
_LARGEST_PORT = 65535
_LISTENING = "0A"
_JOINED, _ALL_JOINED = "paceline/store/joined", "paceline/store/all"  # keys


class StoreServer:
    """Server for a store. It takes ownership of `listener`.

    Python performs only the handshake of each connection; a thread in the core serves the requests.
    """

    def __init__(self, listener: ListeningEndpoint, secret: bytes | None) -> None:
        self._core = _core.StoreServer()
        self._owner = os.getpid()
        self._listener = AuthenticatedListener(
            listener, derive_key(secret, CHANNEL), CHANNEL, self._admit, secret=secret
        )

    @classmethod
    def on_unix_path(cls, path: str, secret: bytes | None) -> StoreServer:
        """Serves on a Unix socket at `path`, whose directory should be accessible only to its owner."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(BACKLOG)
            return cls(listener, secret)
        except BaseException:
            listener.close()
            raise

    @property
    def port(self) -> int:
        """The TCP port on which the server listens."""
        return self._listener.port

    def close(self) -> None:
        """Closes the listener and every connection; idempotent, and without effect in a forked child."""
        self._listener.close()
        if os.getpid() == self._owner:
            self._core.close()

    def _admit(self, connection: Connection, _hello: PeerHello) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._core.adopt(release_to_core(connection))


_shared_servers: weakref.WeakValueDictionary[int, StoreServer] = weakref.WeakValueDictionary()


class PortInUseError(StoreConnectionError):
    """Another process listens on the server's port."""


class TCPStore(RemoteStore):
    """A store served over TCP at `host_name`:`port`.

    Args:
        host_name: the name or address (IPv4 or IPv6) of the serving rank, the same on every rank. The server listens
            only on this address.
        port: the server's port. If it is 0 on the server, the system chooses a port; see the attribute `port`.
        world_size: the number of clients, including the serving rank; None if unknown.
        is_master: whether this process serves the store.
        timeout: the timeout for connecting and for each blocking call, in seconds or as a timedelta.
        wait_for_workers: whether the serving rank waits until `world_size` clients have connected.
        multi_tenant: whether to reuse a server that this process already runs on `port`.
        master_listen_fd: the descriptor of a listening socket, which the server closes.
        use_libuv: only sets `libuvBackend`, because Paceline has one server implementation (torch has two).

    Raises:
        ValueError: the address is not loopback and the job has no secret, or there is no such port.
        StoreConnectionError: the port is in use (the message identifies the process that uses it, if known), or no
            server answered within `timeout`.
        AuthenticationError: the server at this address belongs to another job.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if not 0 <= int(port) <= _LARGEST_PORT:
            raise ValueError(f"TCPStore: port is {port}; it must be from 0 to {_LARGEST_PORT}")
        self.host = host_name
        self.world_size = world_size
        self._use_libuv = use_libuv
        secret = job_secret()
        self._server: StoreServer | None = None
        self._owns_server = False
        if is_master:
            self._server = _shared_servers.get(port) if multi_tenant else None
            if self._server is None:
                listener: ListeningEndpoint = (
                    socket.socket(fileno=master_listen_fd)
                    if master_listen_fd is not None
                    else listen(host_name, port, secret)
                )
                require_secret(listener.getsockname()[0], secret)
                self._server = StoreServer(listener, secret)
                self._owns_server = True
                _shared_servers[self._server.port] = self._server
        self.port = served = self._server.port if self._server is not None else port
        place = f"{host_name}:{served}"

        def dial(timeout_s: float) -> socket.socket:
            return dial_with_secret((host_name, served), timeout_s, secret)

        try:
            super().__init__(
                lambda is_wanted: connect(dial, place, secret, timeout, is_wanted), f"TCPStore({place})", timeout
            )
            if world_size is not None and wait_for_workers:
                self._wait_for_workers(world_size)
        except BaseException:
            self.close()
            raise

    @property
    def serves(self) -> bool:
        """Whether this process serves the store; if so, `close` closes the store for all ranks."""
        return self._owns_server

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 (the name in torch)
        """The value of the argument `use_libuv`."""
        return self._use_libuv

    def close(self) -> None:
        """Closes the connection and, on the serving rank, the server; idempotent."""
        if hasattr(self, "_clients"):
            super().close()
        if self._server is not None and self._owns_server:
            self._server.close()
            if _shared_servers.get(self.port) is self._server:
                del _shared_servers[self.port]

    def __del__(self) -> None:
        if hasattr(self, "_owns_server"):
            self.close()

    def _wait_for_workers(self, world_size: int) -> None:
        joined = self.add(_JOINED, 1)
        if joined == world_size:
            self.set(_ALL_JOINED, b"")
        if self._server is not None:
            try:
                self.wait([_ALL_JOINED])
            except StoreTimeoutError as error:
                raise RendezvousTimeoutError(
                    f"{self} waited {to_seconds(self.timeout):.0f} s for {world_size} clients; "
                    f"{self.get(_JOINED).decode()} connected. Check that every rank was started with this address"
                ) from error


def listen(host_name: str, port: int, secret: bytes | None) -> ListeningEndpoint:
    """Returns a listener on the first address of `host_name`, never on a wildcard address.

    In a job with a single port for all connections between machines, `port` is the number to listen on, and the
    listener's address contains this number instead of a port.

    Raises:
        PortInUseError: another process listens on the port.
        StoreConnectionError: the address does not belong to this machine.
        ValueError: the address is not loopback and there is no secret.
    """
    shared = chosen_port()
    if shared is None or is_loopback(address := str(_first_address(host_name, port)[4][0])):
        return listen_at_port(host_name, port, secret)
    from paceline.comm.one_port.port_multiplexer import listen_at_number

    require_secret(address, secret)
    try:
        return listen_at_number(address, port, shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"this machine's listeners share port {shared} of {host_name}, where number {port} is not available: "
                f"{error.strerror}{_held(shared)}. Each job on a machine needs its own port: stop the other job, or "
                "choose another port"
            ) from error
        _require_own(host_name, address, error)
        raise


def listen_at_port(host_name: str, port: int, secret: bytes | None) -> socket.socket:
    """Same as `listen`, but the returned socket always listens on its own port."""
    return bind_to_port(host_name, port, secret, is_listening=True)


def bind_to_port(host_name: str, port: int, secret: bytes | None, is_listening: bool = False) -> socket.socket:
    """Returns a socket bound to its own port, and listening if `is_listening`; raises the same errors as `listen`."""
    family, kind, protocol, _, address = _first_address(host_name, port)
    require_secret(str(address[0]), secret)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if is_listening:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"port {port} of {host_name} is in use{_held(port)}; stop that process or choose another port "
                "(`paceline run` chooses a free one by itself)"
            ) from error
        _require_own(host_name, str(address[0]), error)
        raise
    return listener


def _first_address(host_name: str, port: int) -> tuple[int, int, int, str, Any]:
    return socket.getaddrinfo(resolver_name(host_name), port, type=socket.SOCK_STREAM)[0]


def _held(port: int) -> str:
    holder = port_owner(port)
    return f" by {holder}" if holder is not None else ""


def _require_own(host_name: str, address: str, error: OSError) -> None:
    """Raises a StoreConnectionError if `error` reports that the address belongs to another machine."""
    if error.errno == errno.EADDRNOTAVAIL:
        raise StoreConnectionError(
            f"{host_name} ({address}) is not an address of this machine ({socket.gethostname()}), so rank 0 cannot "
            "serve the store there; pass the address of the machine on which rank 0 runs"
        ) from error


def port_owner(port: int) -> str | None:
    """Describes the process that listens on a port on this machine, for example as "process 4711 (python train.py)".

    Returns None if the process belongs to another user or has exited.
    """
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    if not sockets:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in sockets:
                        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        return f"process {process.name} ({' '.join(command.split())[:80]})"
    return None


def _listening_inodes(table: str, port: int) -> list[str]:
    try:
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
