"""Listens at the one port of a machine, and hands each connection to the listener that holds the wanted number.

Which listener of a machine holds which number: without a socket or a clock.

A listener that has a number behind the machine's port, where others have a port.
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
from typing import Generic, TypeVar

from paceline.comm.one_port.dialer import (
    GATE_VARIABLE,
    HEADER_BYTES,
    NO_LISTENER,
    PASSED_ON,
    has_no_header,
    is_wrong,
    number_in,
)
from paceline.comm.security.handshake import TIMEOUT_S, WITHOUT_HEADER, is_hello
from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.security.untrusted_peers import (
    PendingConnections,
    RejectedConnections,
    is_same_user,
    origin_of_connection,
)
from paceline.linux import is_out_of_descriptors
from paceline.routes import resolver_name

FIRST, LAST = 1024, 28_999  # given to those that want any; numbers that are chosen are mostly larger

Holder = TypeVar("Holder", bound=Hashable)


class NumberTable(Generic[Holder]):
    """The numbers that are held.

    Those that are given are counted up, so that a number returns as late as possible: who still wants its last holder
    finds nobody rather than another one.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Holder] = {}
        self._next = FIRST

    def take(self, wanted: int, holder: Holder) -> int:
        """Gives a listener the number that it wants, or a free one if that is 0; returns the number.

        Raises:
            OSError: another listener holds the number, or all are held.
        """
        if wanted == 0:
            wanted = self._free()
        elif wanted in self._holders:
            raise OSError(errno.EADDRINUSE, f"another listener of this machine has the number {wanted}")
        self._holders[wanted] = holder
        return wanted

    def holder(self, number: int) -> Holder | None:
        """Returns who holds a number; None if nobody does."""
        return self._holders.get(number)

    def release(self, holder: Holder) -> None:
        """Takes back all numbers of a listener; idempotent."""
        self._holders = {number: each for number, each in self._holders.items() if each != holder}

    def _free(self) -> int:
        for _ in range(FIRST, LAST + 1):
            number = self._next
            self._next = FIRST if number == LAST else number + 1
            if number not in self._holders:
                return number
        raise OSError(errno.EADDRNOTAVAIL, f"all numbers from {FIRST} to {LAST} are held")


MAX_PENDING_CLIENTS = 128
_BACKLOG = 1024
_LARGEST_REQUEST = 1024
_QUEUE_NBYTES = 1 << 20  # for connections that a listener has not accepted: each takes some 800, the default is for 280
_SHORTAGE_PAUSE_S = 0.05  # when the system cannot give a connection, for example because descriptors ran out


@dataclass(eq=False)
class _PendingClient:
    """A connection whose header has not come in full."""

    connection: socket.socket
    host: str
    until_s: float
    received: bytes = b""


@dataclass(eq=False)
class _RegisteredListener:
    """A listener of this machine, which ends with the connection over which it has asked for a number."""

    connection: socket.socket


class PortMultiplexer:
    """Serves, in a thread of its own, until `close`.

    It listens on the addresses for which numbers are asked, at one port. At most `MAX_COMERS` connections may be about
    to say what they want: one more ends the oldest of the user or host that has the most of them, so that silent
    connections cannot keep others out.

    Args:
        port: the port.
        name: of the abstract Unix socket at which processes of the same user ask for numbers.

    Raises:
        OSError: another gate has that name.
    """

    def __init__(self, port: int, name: str) -> None:
        self._port = port
        self._numbers: NumberTable[_RegisteredListener] = NumberTable()
        self._comers: PendingConnections[_PendingClient] = PendingConnections(
            MAX_PENDING_CLIENTS, lambda comer: origin_of_connection(comer.connection)
        )
        self._addresses: set[object] = set()
        self._refusals = RejectedConnections("port")
        self._owner = os.getpid()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._waiting, self._waking = socket.socketpair()
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            asking.bind(f"\0{name}")
            asking.listen(_BACKLOG)
        except BaseException:
            for each in (asking, self._waiting, self._waking, self._selector):
                each.close()
            raise
        self._watch(asking, partial(self._welcome, asking))
        self._watch(self._waiting, lambda: None)
        self._thread = threading.Thread(target=self._run, name="paceline-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more, and ends what has not been handed on; idempotent, without effect in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._waking.send(b".")
        self._thread.join()
        self.let_go()
        self._refusals.close()

    def let_go(self) -> None:
        """Closes this process's descriptors and no more, as a forked child does: the gate's thread is not in it."""
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
            oldest = next(iter(self._comers), None)
            patience_s = None if oldest is None else max(0.0, oldest.until_s - time.monotonic())
            for key, _ in self._selector.select(patience_s):
                if self._selector.get_map().get(key.fd) is key:  # not closed by one before it
                    key.data()
            now_s = time.monotonic()
            for comer in [each for each in self._comers if now_s >= each.until_s]:
                self._refuse(comer, f"{comer.host} did not say within {TIMEOUT_S:.0f} s what it wants")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if is_out_of_descriptors(error):
                time.sleep(_SHORTAGE_PAUSE_S)
            return
        comer = _PendingClient(connection, str(address[0]), time.monotonic() + TIMEOUT_S)
        self._watch(connection, partial(self._hear, comer))
        crowded_out = self._comers.add(comer)
        if crowded_out is not None:
            self._refuse(crowded_out, f"{crowded_out.host} was silent while {MAX_PENDING_CLIENTS} others came")

    def _hear(self, comer: _PendingClient) -> None:
        try:
            data = comer.connection.recv(HEADER_BYTES - len(comer.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        comer.received += data
        if not data:  # it has ended, as a worker that is killed does
            self._forget(comer)
            comer.connection.close()
        elif has_no_header(comer.received):
            with contextlib.suppress(OSError):
                comer.connection.send(WITHOUT_HEADER)
            self._refuse(comer, f"{comer.host} did not say what it wants; start all launchers with the same --port")
        elif is_wrong(comer.received) and not is_hello(comer.received):
            self._refuse(comer, f"{comer.host} spoke another protocol")
        elif len(comer.received) == HEADER_BYTES:
            self._pass_on(comer)

    def _pass_on(self, comer: _PendingClient) -> None:
        self._forget(comer)
        tenant = self._numbers.holder(number_in(comer.received))
        # An error means that one of them is gone, or that the tenant accepts nothing; the comer sees the end, and tries
        # again.
        with comer.connection as connection, contextlib.suppress(OSError):
            if tenant is None:
                connection.send(NO_LISTENER)
                return
            connection.send(PASSED_ON)
            connection.setblocking(True)  # which the descriptors that lead to it share
            socket.send_fds(tenant.connection, [b"c"], [connection.fileno()])

    def _refuse(self, comer: _PendingClient, why: str) -> None:
        self._forget(comer)
        comer.connection.close()
        self._refusals.add(comer.host, why)

    def _forget(self, comer: _PendingClient) -> None:
        self._selector.unregister(comer.connection)
        self._comers.remove(comer)

    def _welcome(self, asking: socket.socket) -> None:
        try:
            connection, _ = asking.accept()
        except OSError as error:
            if is_out_of_descriptors(error):
                time.sleep(_SHORTAGE_PAUSE_S)
            return
        if is_same_user(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_NBYTES)
            tenant = _RegisteredListener(connection)
            self._watch(connection, partial(self._serve, tenant))
        else:
            connection.close()

    def _serve(self, tenant: _RegisteredListener) -> None:
        try:
            request = tenant.connection.recv(_LARGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if not request:
            self._end(tenant)
            return
        with contextlib.suppress(OSError):  # it has ended
            tenant.connection.send(self._answer(tenant, request))

    def _answer(self, tenant: _RegisteredListener, request: bytes) -> bytes:
        """Gives a number, after an address for it; returns the number, or the code and the words of an error."""
        try:
            wanted, _, address = request.decode().partition(" ")
            holder = self._numbers.holder(int(wanted))
            if holder is not None and _has_ended(holder):
                self._end(holder)
            self._listen_on(address)
            return f"0 {self._numbers.take(int(wanted), tenant)}".encode()
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

    def _end(self, tenant: _RegisteredListener) -> None:
        self._numbers.release(tenant)
        self._selector.unregister(tenant.connection)
        tenant.connection.close()


def _has_ended(tenant: _RegisteredListener) -> bool:
    """Returns whether a listener is gone; the loop may not have come to its end yet."""
    try:
        return not tenant.connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


_PATIENCE_S = 30.0
_RETRY_PAUSE_S = 0.02
_TIMEVAL = struct.Struct("ll")
_LARGEST_ANSWER = 1024

_multiplexers: dict[
    str, PortMultiplexer
] = {}  # of this process, by name: it was the first to ask, in a job without a launcher


class NumberedListener:
    """Used as a listening socket; what it accepts are the connections themselves, which the gate hands to it.

    Args:
        connection: to the gate, which is taken over.
        host: the address at which others reach it.
        number: its number.
    """

    def __init__(self, connection: socket.socket, host: str, number: int) -> None:
        self._connection = connection
        self._name = host, number
        self.setblocking = connection.setblocking
        self.shutdown = connection.shutdown
        self.close = connection.close
        self.fileno = connection.fileno

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Waits for a connection; returns it and where it comes from. Those that have been reset meanwhile are skipped.

        Raises:
            OSError: the gate has ended, `shutdown` was called, or there are no more descriptors.
        """
        while True:
            connection = self._received()
            try:
                connection.setblocking(True)
                return connection, connection.getpeername()
            except OSError:  # strangers could otherwise have the caller pause as often as they like
                connection.close()

    def _received(self) -> socket.socket:
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if data and not descriptors:  # the kernel drops what this process has no room for
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not descriptors:
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "the process that listens at this machine's port has ended"
            )
        return socket.socket(fileno=descriptors[0])

    def getsockname(self) -> tuple[str, int]:
        """Returns the address and the number."""
        return self._name


def random_name() -> str:
    """Returns a name for a gate that only those know who are told."""
    return f"paceline-gate-{secrets.token_hex(12)}"


def listen_at_number(address: str, number: int, port: int) -> NumberedListener:
    """Asks this machine's gate for a number; in a job without a launcher, the first process that asks becomes the gate.

    Args:
        address: one of this machine's, at which others are to reach the listener.
        number: the number; 0 for any.
        port: the machine's port.

    Raises:
        OSError: the address is not this machine's, another program has the port, or another listener the number.
    """
    until_s = time.monotonic() + _PATIENCE_S
    name = os.environ.get(GATE_VARIABLE) or _name_in_job(port)
    while True:
        try:
            return _ask(name, address, number)
        except (ConnectionError, BlockingIOError) as error:
            if time.monotonic() >= until_s or GATE_VARIABLE in os.environ:
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, f"the process that listens at port {port} of this machine has ended ({error})"
                ) from error
        with contextlib.suppress(OSError):  # another process was quicker
            _multiplexers[name] = PortMultiplexer(port, name)
            continue
        time.sleep(_RETRY_PAUSE_S)


def _ask(name: str, address: str, number: int) -> NumberedListener:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # the descriptor itself blocks, as a listener's does
            connection.setsockopt(socket.SOL_SOCKET, side, _TIMEVAL.pack(int(_PATIENCE_S), 0))
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


def _close_in_child() -> None:
    """Lets go of the gates of the process that forked this one: they end with it, and not with its last child."""
    for gate in _multiplexers.values():
        gate.let_go()
    _multiplexers.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _name_in_job(port: int) -> str:
    """Returns the name of the gate of a job without a launcher; other jobs, and other users, have other names."""
    return f"paceline-gate-{os.getuid()}-{port}-{derive_key(job_secret(), 'gate')[:12].hex()}"
