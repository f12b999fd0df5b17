"""A listener that has a number behind the machine's port, where others have a port."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import time

from paceline.one_port.choice import GATE_VARIABLE
from paceline.one_port.gate import Gate
from paceline.security.peers import is_same_user
from paceline.security.secret import derive_key, job_secret

_PATIENCE_S = 30.0
_PAUSE_S = 0.02
_TIMEVAL = struct.Struct("ll")
_LARGEST_ANSWER = 1024

_gates: dict[str, Gate] = {}  # of this process, by name: it was the first to ask, in a job without a launcher


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


def claim(address: str, number: int, port: int) -> NumberedListener:
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
            _gates[name] = Gate(port, name)
            continue
        time.sleep(_PAUSE_S)


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


def _forget_in_child() -> None:
    """Lets go of the gates of the process that forked this one: they end with it, and not with its last child."""
    for gate in _gates.values():
        gate.let_go()
    _gates.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _name_in_job(port: int) -> str:
    """Returns the name of the gate of a job without a launcher; other jobs, and other users, have other names."""
    return f"paceline-gate-{os.getuid()}-{port}-{derive_key(job_secret(), 'gate')[:12].hex()}"
