"""Listens at the one port of a machine, and hands each connection to the listener that holds the wanted number."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.descriptors import is_shortage
from paceline.one_port.header import HEADER_BYTES, NOBODY, PASSED_ON, has_no_header, is_wrong, number_in
from paceline.one_port.numbers import Numbers
from paceline.routes import for_resolver
from paceline.security.handshake import TIMEOUT_S, WITHOUT_HEADER, is_hello
from paceline.security.peers import is_same_user, origin_of_connection
from paceline.security.pending_connections import PendingConnections
from paceline.security.refusals import Refusals

MAX_COMERS = 128
_BACKLOG = 1024
_LARGEST_REQUEST = 1024
_QUEUE_NBYTES = 1 << 20  # for connections that a listener has not accepted: each takes some 800, the default is for 280
_PAUSE_S = 0.05  # when the system cannot give a connection, for example because descriptors ran out


@dataclass(eq=False)
class _Comer:
    """A connection whose header has not come in full."""

    connection: socket.socket
    host: str
    until_s: float
    received: bytes = b""


@dataclass(eq=False)
class _Tenant:
    """A listener of this machine, which ends with the connection over which it has asked for a number."""

    connection: socket.socket


class Gate:
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
        self._numbers: Numbers[_Tenant] = Numbers()
        self._comers: PendingConnections[_Comer] = PendingConnections(
            MAX_COMERS, lambda comer: origin_of_connection(comer.connection)
        )
        self._addresses: set[object] = set()
        self._refusals = Refusals("port")
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
            if is_shortage(error):
                time.sleep(_PAUSE_S)
            return
        comer = _Comer(connection, str(address[0]), time.monotonic() + TIMEOUT_S)
        self._watch(connection, partial(self._hear, comer))
        crowded_out = self._comers.add(comer)
        if crowded_out is not None:
            self._refuse(crowded_out, f"{crowded_out.host} was silent while {MAX_COMERS} others came")

    def _hear(self, comer: _Comer) -> None:
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

    def _pass_on(self, comer: _Comer) -> None:
        self._forget(comer)
        tenant = self._numbers.holder(number_in(comer.received))
        # An error means that one of them is gone, or that the tenant accepts nothing; the comer sees the end, and tries
        # again.
        with comer.connection as connection, contextlib.suppress(OSError):
            if tenant is None:
                connection.send(NOBODY)
                return
            connection.send(PASSED_ON)
            connection.setblocking(True)  # which the descriptors that lead to it share
            socket.send_fds(tenant.connection, [b"c"], [connection.fileno()])

    def _refuse(self, comer: _Comer, why: str) -> None:
        self._forget(comer)
        comer.connection.close()
        self._refusals.add(comer.host, why)

    def _forget(self, comer: _Comer) -> None:
        self._selector.unregister(comer.connection)
        self._comers.remove(comer)

    def _welcome(self, asking: socket.socket) -> None:
        try:
            connection, _ = asking.accept()
        except OSError as error:
            if is_shortage(error):
                time.sleep(_PAUSE_S)
            return
        if is_same_user(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_NBYTES)
            tenant = _Tenant(connection)
            self._watch(connection, partial(self._serve, tenant))
        else:
            connection.close()

    def _serve(self, tenant: _Tenant) -> None:
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

    def _answer(self, tenant: _Tenant, request: bytes) -> bytes:
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
            for_resolver(address), self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
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

    def _end(self, tenant: _Tenant) -> None:
        self._numbers.release(tenant)
        self._selector.unregister(tenant.connection)
        tenant.connection.close()


def _has_ended(tenant: _Tenant) -> bool:
    """Returns whether a listener is gone; the loop may not have come to its end yet."""
    try:
        return not tenant.connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
