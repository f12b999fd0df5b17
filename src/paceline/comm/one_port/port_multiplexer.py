"""Server on a machine's single port, which passes each connection to the listener with the requested number.

`PortMultiplexer` runs in the launcher or, in a job without one, in the first process on the machine that listens for
connections. `NumberedListener` has the interface of a listening socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from paceline.comm.one_port.dialer import (
    GATE_VARIABLE,
    HEADER_BYTES,
    NO_LISTENER,
    PASSED_ON,
    has_no_header,
    is_wrong,
    number_in,
    resolver_name,
)
from paceline.comm.security.encryption import CLIENT_HELLO, TLS_WITHOUT_HEADER
from paceline.comm.security.handshake import TIMEOUT_S, WITHOUT_HEADER, is_hello
from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.security.untrusted_peers import (
    PendingConnections,
    RejectedConnections,
    is_same_user,
    origin_of_connection,
)
from paceline.linux import is_out_of_descriptors

FIRST, LAST = 1024, 28_999  # range of automatically assigned numbers; explicitly chosen numbers are usually larger
MAX_PENDING_CLIENTS = 128
_BACKLOG = 1024
_LARGEST_CLIENT_HELLO = 1 << 14  # the longest TLS record
_LARGEST_REQUEST = 1024
_LARGEST_ANSWER = 1024
_QUEUE_NBYTES = 1 << 20  # for pending connections, which take about 800 bytes each; the default holds only 280
_SHORTAGE_PAUSE_S = 0.05  # pause after a failed `accept`, for example when descriptors run out
_PATIENCE_S = 30.0
_RETRY_PAUSE_S = 0.02
_TIMEVAL = struct.Struct("ll")

Holder = TypeVar("Holder", bound=Hashable)


class NumberTable(Generic[Holder]):
    """Table of the assigned numbers and their holders. It performs no I/O.

    Free numbers are assigned in ascending order to delay the reuse of a number. A connection meant for a former
    holder is then rejected rather than passed to a different listener.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Holder] = {}
        self._next = FIRST

    def take(self, wanted: int, holder: Holder) -> int:
        """Assigns the requested number to a listener, or a free one if `wanted` is 0; returns the number.

        Raises an OSError if another listener holds the number, or if no number is free.
        """
        if wanted == 0:
            wanted = self._free()
        elif wanted in self._holders:
            raise OSError(errno.EADDRINUSE, f"another listener of this machine has the number {wanted}")
        self._holders[wanted] = holder
        return wanted

    def holder(self, number: int) -> Holder | None:
        """Returns the holder of a number, or None."""
        return self._holders.get(number)

    def release(self, holder: Holder) -> None:
        """Releases all numbers of a listener; idempotent."""
        self._holders = {number: other for number, other in self._holders.items() if other != holder}

    def _free(self) -> int:
        for _ in range(FIRST, LAST + 1):
            number = self._next
            self._next = FIRST if number == LAST else number + 1
            if number not in self._holders:
                return number
        raise OSError(errno.EADDRNOTAVAIL, f"all numbers from {FIRST} to {LAST} are in use")


@dataclass(eq=False)
class _PendingClient:
    """A connection whose header is still incomplete."""

    connection: socket.socket
    host: str
    until_s: float
    received: bytes = b""


class PortMultiplexer:
    """Server for one port, which runs on its own thread.

    It listens on the addresses for which numbers were requested. At most `MAX_PENDING_CLIENTS` connections may have an
    incomplete header. Beyond this limit, the oldest one from the user or host with the most such connections is closed,
    so that silent peers cannot block others. The same user's processes request numbers on the abstract Unix socket
    `name`. An OSError is raised if another multiplexer uses that name.
    """

    def __init__(self, port: int, name: str) -> None:
        self._port = port
        # A listener is registered while the connection on which it requested its number is open.
        self._numbers: NumberTable[socket.socket] = NumberTable()
        self._clients: PendingConnections[_PendingClient] = PendingConnections(
            MAX_PENDING_CLIENTS, lambda client: origin_of_connection(client.connection)
        )
        self._addresses: set[object] = set()
        self._rejected = RejectedConnections("port")
        self._owner = os.getpid()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._waiting, self._waking = socket.socketpair()
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            requests.bind(f"\0{name}")
            requests.listen(_BACKLOG)
        except BaseException:
            for resource in (requests, self._waiting, self._waking, self._selector):
                resource.close()
            raise
        self._watch(requests, partial(self._accept_listener, requests))
        self._watch(self._waiting, lambda: None)
        self._thread = threading.Thread(target=self._run, name="paceline-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the port and the connections not yet passed on; idempotent, and without effect in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._waking.send(b".")
        self._thread.join()
        for key in self._selector.get_map().values():
            assert isinstance(key.fileobj, socket.socket)
            with contextlib.suppress(OSError):  # not connected
                # A child that has just been forked may not have closed its copies of the descriptors yet, and these
                # copies would keep the port open.
                key.fileobj.shutdown(socket.SHUT_RDWR)
        self.close_descriptors()
        self._rejected.close()

    def close_descriptors(self) -> None:
        """Closes only this process's descriptors, for use in a forked child, where the server thread does not exist."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._waking.close()

    def _watch(self, readable: socket.socket, act: Callable[[], None]) -> None:
        readable.setblocking(False)
        self._selector.register(readable, selectors.EVENT_READ, act)

    def _run(self) -> None:
        while not self._closed:
            oldest = next(iter(self._clients), None)
            patience_s = None if oldest is None else max(0.0, oldest.until_s - time.monotonic())
            for key, _ in self._selector.select(patience_s):
                if self._selector.get_map().get(key.fd) is key:  # false if an earlier iteration closed this one
                    key.data()
            now_s = time.monotonic()
            for client in self._clients:  # iterates over a copy
                if now_s >= client.until_s:
                    self._reject(client, f"{client.host} did not request a listener within {TIMEOUT_S:.0f} s")

    def _accept(self, listener: socket.socket) -> None:
        if (accepted := _accepted(listener)) is None:
            return
        connection, address = accepted
        client = _PendingClient(connection, str(address[0]), time.monotonic() + TIMEOUT_S)
        self._watch(connection, partial(self._receive, client))
        crowded_out = self._clients.add(client)
        if crowded_out is not None:
            self._reject(crowded_out, f"{crowded_out.host} sent nothing while {MAX_PENDING_CLIENTS} others connected")

    def _receive(self, client: _PendingClient) -> None:
        try:
            data = client.connection.recv(HEADER_BYTES - len(client.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        if not data:  # the client closed the connection, for example because it was killed
            self._remove(client)
            client.connection.close()
        elif has_no_header(client.received):
            self._reject_without_header(client, WITHOUT_HEADER)
        elif client.received.startswith(CLIENT_HELLO):
            self._reject_without_header(client, TLS_WITHOUT_HEADER, unread=_LARGEST_CLIENT_HELLO)
        elif is_wrong(client.received) and not is_hello(client.received):
            self._reject(client, f"{client.host} used a protocol other than the expected one")
        elif len(client.received) == HEADER_BYTES:
            self._pass_on(client)

    def _pass_on(self, client: _PendingClient) -> None:
        self._remove(client)
        holder = self._numbers.holder(number_in(client.received))
        # An error occurs if the client or the holder has exited, or if the holder's queue is full. The client's
        # connection is then closed, and the client retries.
        with client.connection as connection, contextlib.suppress(OSError):
            if holder is None:
                connection.send(NO_LISTENER)
                return
            connection.send(PASSED_ON)
            connection.setblocking(True)  # the duplicate descriptor shares this flag
            socket.send_fds(holder, [b"c"], [connection.fileno()])

    def _reject_without_header(self, client: _PendingClient, answer: bytes, unread: int = 0) -> None:
        with contextlib.suppress(OSError):
            if unread:
                client.connection.recv(unread)  # otherwise closing the connection would discard the answer
            client.connection.send(answer)
        self._reject(client, f"{client.host} did not request a listener; start all launchers with the same --port")

    def _reject(self, client: _PendingClient, why: str) -> None:
        self._remove(client)
        client.connection.close()
        self._rejected.add(client.host, why)

    def _remove(self, client: _PendingClient) -> None:
        self._selector.unregister(client.connection)
        self._clients.remove(client)

    def _accept_listener(self, requests: socket.socket) -> None:
        if (accepted := _accepted(requests)) is None:
            return
        holder, _ = accepted
        if is_same_user(holder):
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_NBYTES)
            self._watch(holder, partial(self._serve, holder))
        else:
            holder.close()

    def _serve(self, holder: socket.socket) -> None:
        try:
            request = holder.recv(_LARGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if not request:
            self._end(holder)
            return
        with contextlib.suppress(OSError):  # the listener has closed its connection
            holder.send(self._answer(holder, request))

    def _answer(self, listener: socket.socket, request: bytes) -> bytes:
        """Listens on the requested address; returns "0" and the assigned number, or an error's code and text."""
        try:
            wanted, _, address = request.decode().partition(" ")
            holder = self._numbers.holder(int(wanted))
            if holder is not None and _has_ended(holder):
                self._end(holder)
            self._listen_on(address)
            return f"0 {self._numbers.take(int(wanted), listener)}".encode()
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
            return f"{code} {error.strerror if isinstance(error, OSError) else error}".encode()

    def _listen_on(self, address: str) -> None:
        family, kind, protocol, _, where = socket.getaddrinfo(
            resolver_name(address), self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        if where in self._addresses:
            return
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._addresses.add(where)
        self._watch(listener, partial(self._accept, listener))

    def _end(self, holder: socket.socket) -> None:
        self._numbers.release(holder)
        self._selector.unregister(holder)
        holder.close()


def _accepted(listener: socket.socket) -> tuple[socket.socket, Any] | None:
    """Accepts a connection, or returns None after an error. Pauses first if the process is out of descriptors."""
    try:
        return listener.accept()
    except OSError as error:
        if is_out_of_descriptors(error):
            time.sleep(_SHORTAGE_PAUSE_S)
        return None


def _has_ended(holder: socket.socket) -> bool:
    """Returns True if a listener has closed its connection, even if the event loop has not processed this yet."""
    try:
        return not holder.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class NumberedListener:
    """Listener for one number on the machine's single port, with the interface of a listening socket.

    The multiplexer passes client connections over `connection`, which the listener closes. Other machines reach the
    listener at `host`.
    """

    def __init__(self, connection: socket.socket, host: str, number: int) -> None:
        self._connection = connection
        self._name = host, number
        self.setblocking = connection.setblocking
        self.shutdown = connection.shutdown
        self.close = connection.close
        self.fileno = connection.fileno

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Waits for a connection and returns it with its peer's address. Reset connections are skipped.

        Raises an OSError if the multiplexer has exited, if `shutdown` was called, or if no descriptor is free.
        """
        while True:
            connection = self._received()
            try:
                connection.setblocking(True)
                return connection, connection.getpeername()
            except OSError:  # not re-raised: callers pause after an error, so any peer could delay them
                connection.close()

    def _received(self) -> socket.socket:
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if data and not descriptors:  # the kernel drops a descriptor that would exceed this process's limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not descriptors:
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "the process that listens on this machine's port has exited"
            )
        return socket.socket(fileno=descriptors[0])

    def getsockname(self) -> tuple[str, int]:
        """Returns the listener's address and number."""
        return self._name


def random_name() -> str:
    """Returns an unguessable name for a multiplexer's Unix socket."""
    return f"paceline-gate-{secrets.token_hex(12)}"


def listen_at_number(address: str, number: int, port: int) -> NumberedListener:
    """Requests a number from this machine's multiplexer; in a job without a launcher, starts one if necessary.

    Other machines reach the listener at `address`, which must belong to this machine. If `number` is 0, any free number
    is assigned. Raises an OSError if another program uses the port, or if another listener holds the number.
    """
    until_s = time.monotonic() + _PATIENCE_S
    name = os.environ.get(GATE_VARIABLE) or _name_in_job(port)
    while True:
        try:
            return _request_listener(name, address, number)
        except (ConnectionError, BlockingIOError) as error:
            if time.monotonic() >= until_s or GATE_VARIABLE in os.environ:
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, f"the process that listens on port {port} of this machine has exited ({error})"
                ) from error
        with contextlib.suppress(OSError):  # another process has just started the multiplexer
            _multiplexers[name] = PortMultiplexer(port, name)
            continue
        time.sleep(_RETRY_PAUSE_S)


def _request_listener(name: str, address: str, number: int) -> NumberedListener:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # the descriptor must remain blocking
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(_PATIENCE_S), 0))
        connection.connect(f"\0{name}")
        if not is_same_user(connection):
            raise PermissionError(errno.EPERM, f"the Unix socket @{name} belongs to another user")
        connection.send(f"{number} {address}".encode())
        answer = connection.recv(_LARGEST_ANSWER).decode()
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        code, _, words = answer.partition(" ")
        if int(code):
            raise OSError(int(code), words)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, 0))
        return NumberedListener(connection, address, int(words))
    except BaseException:
        connection.close()
        raise


def _name_in_job(port: int) -> str:
    """Returns the multiplexer's name in a job without a launcher; each job and each user has a different name."""
    return f"paceline-gate-{os.getuid()}-{port}-{derive_key(job_secret(), 'gate')[:12].hex()}"


# The multiplexers that this process started in a job without a launcher, by name. Forked children close their copies of
# the descriptors, so a multiplexer stops when this process exits.
_multiplexers: dict[str, PortMultiplexer] = {}


def _close_in_child() -> None:
    for multiplexer in _multiplexers.values():
        multiplexer.close_descriptors()
    _multiplexers.clear()


os.register_at_fork(after_in_child=_close_in_child)
