"""Handshakes on a new connection: TLS if encryption is required, then a proof from each end that it has the secret.

The connecting side begins with or without TLS. The accepting side inspects the first byte to distinguish the two cases,
and rejects a plaintext connection where encryption is required. On every connection, the proofs follow:

    connecting -> accepting   hello: magic, channel, rank, lane, generation, nonce
    accepting  -> connecting  nonce, HMAC-SHA256(key, "S" | hello | nonce)
    connecting -> accepting   HMAC-SHA256(key, "C" | all so far), or zeros if the other proof was wrong

The letters prevent reflection, the nonces prevent replay, and the channel's name prevents a connection to one service
from being spliced into a connection to another. The proofs take 140 bytes. Data from a peer is not used before the
peer's proof has been checked. The one exception is a hello for the channel `running`, with which a launcher reports its
running job to a process that has another secret. It contains no other data, and no reply follows.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time

from paceline.comm.security.encryption import CLIENT_HELLO, Connection, EncryptedSocket, is_between_machines
from paceline.comm.security.secret import chosen_level, derive_key, must_encrypt
from paceline.errors import AuthenticationError

TYPE_CHECKING = False  # every worker imports this module, and importing typing takes time
if TYPE_CHECKING:
    from typing import NoReturn

TIMEOUT_S = 5.0

_HELLO = struct.Struct("<8s8sIIQ16s")
HELLO_BYTES = _HELLO.size
_MAGIC = b"paceln/1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_ENCRYPTED_ONLY = b"this job takes encrypted connections only".ljust(_NONCE_BYTES + _PROOF_BYTES, b".")
WITHOUT_HEADER = b"one port for many: say which number you want".ljust(_NONCE_BYTES + _PROOF_BYTES, b".")
_REASON_WITHOUT_HEADER = "no application protocol"
_RUNNING = "running"
_REFUSAL = bytes(_PROOF_BYTES)  # equals a valid proof with a probability of only 1 in 2**256


class HandshakeUnfinishedError(AuthenticationError):
    """The peer stopped answering or closed the connection before the secret was checked; a retry may succeed."""


class PeerGoneError(HandshakeUnfinishedError):
    """The peer closed the connection without sending invalid data. It either exited or requested another service."""


class ForeignJobError(AuthenticationError):
    """The peer reports that a job with another secret is running. The report cannot be verified."""


class PeerHello:
    """First message from the connecting side: it requests a service by its channel's name."""

    def __init__(self, channel: str, rank: int = 0, generation: int = 0, lane: int = 0) -> None:
        self.channel = channel
        self.rank = rank
        self.generation = generation
        self.lane = lane  # the index of the connection among the connections between the two ranks


def encrypt_as_client(connection: socket.socket, secret: bytes | None, timeout_s: float) -> Connection:
    """Encrypts a new connection on the connecting side if its addresses and the level require it.

    Raises:
        AuthenticationError: the peer has another job's certificate, does not use TLS, or serves several listeners on
            one port and received no header.
        HandshakeUnfinishedError: the peer did not answer in time, or closed the connection.
        ValueError: no suitable OpenSSL is installed.
    """
    if not is_between_machines(connection) or not _is_due(connection):
        return connection
    encrypted = EncryptedSocket(connection, secret, accepts=False)
    try:
        why = encrypted.handshake(timeout_s)
    except OSError as error:
        raise _interrupted_handshake(connection, error) from error
    if _REASON_WITHOUT_HEADER in why:
        raise _missing_header(connection)
    if why:
        raise AuthenticationError(
            f"the process at {_name_of(connection)} does not hold this job's secret ({why}); all ranks need the same "
            "PACELINE_SECRET, and the address must be this job's"
        )
    return encrypted


def encrypt_as_server(connection: socket.socket, secret: bytes | None, timeout_s: float) -> Connection:
    """Encrypts a new connection on the accepting side if the peer begins with TLS.

    Raises:
        AuthenticationError: the connection is plaintext although encryption is required, or the peer has a different
            certificate.
        HandshakeUnfinishedError: the handshake did not begin or did not complete in time.
    """
    if not is_between_machines(connection):
        return connection
    deadline = time.monotonic() + timeout_s
    try:
        connection.settimeout(timeout_s)
        first = connection.recv(1, socket.MSG_PEEK)
        if first != CLIENT_HELLO:
            if first and _is_due(connection):
                _refuse_plain(connection, timeout_s)
            return connection
        encrypted = EncryptedSocket(connection, secret, accepts=True)
        why = encrypted.handshake(max(0.0, deadline - time.monotonic()))
    except OSError as error:
        raise _interrupted_handshake(connection, error) from error
    except ValueError as error:  # no suitable OpenSSL is installed
        raise AuthenticationError(f"{_name_of(connection)} requests encryption: {error}") from error
    if why:
        raise AuthenticationError(f"{_name_of(connection)} does not hold this job's certificate ({why})")
    return encrypted


def _is_due(connection: socket.socket) -> bool:
    return must_encrypt(connection.getsockname()[0], connection.getpeername()[0], chosen_level())


def prove(connection: Connection, key: bytes, hello: PeerHello, timeout_s: float = TIMEOUT_S) -> None:
    """Runs the connecting side of the handshake: sends a proof of the secret and checks the peer's proof.

    Raises:
        AuthenticationError: the peer does not hold the key.
        HandshakeUnfinishedError: the peer did not answer in time, or closed the connection.
    """
    deadline = time.monotonic() + timeout_s
    own_nonce = os.urandom(_NONCE_BYTES)
    first = _HELLO.pack(_MAGIC, hello.channel.encode(), hello.rank, hello.lane, hello.generation, own_nonce)
    _send(connection, first, deadline)
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if answer == _ENCRYPTED_ONLY:
        raise AuthenticationError(
            f"the process at {_name_of(connection)} accepts only encrypted connections, but this one is not encrypted: "
            "start every launcher with --security encrypt, or every rank with PACELINE_SECURITY=encrypt"
        )
    if answer == WITHOUT_HEADER:
        raise _missing_header(connection)
    if not hmac.compare_digest(proof, _digest(key, b"S", first, nonce)):
        with contextlib.suppress(HandshakeUnfinishedError):
            _send(connection, _REFUSAL, deadline)  # the accepting side can then report the reason
        raise AuthenticationError(
            f"the process at {_name_of(connection)} does not hold this job's secret (channel {hello.channel!r}); "
            "all ranks need the same PACELINE_SECRET, and the address must be this job's"
        )
    _send(connection, _digest(key, b"C", first, answer), deadline)


def connect_with_secret(plain: socket.socket, secret: bytes | None, channel: str) -> Connection:
    """Runs both handshakes of the connecting side with the keys of a channel; see `connect_with_key`."""
    return connect_with_key(plain, secret, derive_key(secret, channel), PeerHello(channel))


def connect_with_key(
    plain: socket.socket, secret: bytes | None, key: bytes, hello: PeerHello, timeout_s: float = TIMEOUT_S
) -> Connection:
    """Encrypts a new connection with `secret` and authenticates it with `key`; closes it if either handshake fails.

    `timeout_s` limits the time for the encryption.
    """
    try:
        connection = encrypt_as_client(plain, secret, timeout_s)
        prove(connection, key, hello)
        return connection
    except BaseException:
        plain.close()
        raise


def warn_of_running_job(connection: socket.socket, timeout_s: float = TIMEOUT_S) -> None:
    """Reports to the process at the other end, which has another secret, that this process's job is running.

    The connection must not be encrypted yet. Raises a HandshakeUnfinishedError if the report cannot be sent.
    """
    hello = _HELLO.pack(_MAGIC, _RUNNING.encode(), 0, 0, 0, os.urandom(_NONCE_BYTES))
    _send(connection, hello, time.monotonic() + timeout_s)


def _missing_header(connection: Connection) -> AuthenticationError:
    """Returns the error for a peer that serves all of its machine's listeners on one port and received no header."""
    return AuthenticationError(
        f"at {_name_of(connection)} one port serves all listeners of that machine, but this connection did not specify "
        "a listener: start every launcher with the same --port, or every rank with the same PACELINE_PORT"
    )


def verify(
    connection: Connection, key: bytes, channel: str, generation: int = 0, timeout_s: float = TIMEOUT_S
) -> PeerHello:
    """Runs the accepting side of the handshake: checks the peer's proof and sends its own; returns the peer's hello.

    Raises:
        AuthenticationError: the peer does not hold the key, or uses another protocol.
        ForeignJobError: the peer reports a running job that has another secret.
        HandshakeUnfinishedError: the peer did not answer in time.
        PeerGoneError: the peer closed the connection.
    """
    deadline = time.monotonic() + timeout_s
    expected = struct.pack("<8s8s", _MAGIC, channel.encode())
    first = _receive(connection, _HELLO.size, deadline, expected)
    _, _, rank, lane, peer_generation, _ = _HELLO.unpack(first)
    _require_own_job(connection, first)
    if not first.startswith(expected):
        raise AuthenticationError(f"{_name_of(connection)} uses a protocol other than Paceline's {channel!r}")
    nonce = os.urandom(_NONCE_BYTES)
    answer = nonce + _digest(key, b"S", first, nonce)
    _send(connection, answer, deadline)
    proof = _receive(connection, _PROOF_BYTES, deadline)
    if proof == _REFUSAL:
        raise AuthenticationError(f"{_name_of(connection)} does not accept this process's proof of the job's secret")
    if not hmac.compare_digest(proof, _digest(key, b"C", first, answer)):
        raise AuthenticationError(f"{_name_of(connection)} does not hold this job's secret")
    if peer_generation != generation:
        raise AuthenticationError(
            f"{_name_of(connection)} (rank {rank}) is of generation {peer_generation}; this is generation {generation}"
        )
    return PeerHello(channel, rank, generation, lane)


def is_hello(beginning: bytes) -> bool:
    """Returns True if the received bytes begin like a handshake hello."""
    return beginning[: len(_MAGIC)] == _MAGIC[: len(beginning)]


def _refuse_plain(connection: socket.socket, timeout_s: float = TIMEOUT_S) -> NoReturn:
    """Rejects a plaintext connection where encryption is required, and informs the peer if it is a Paceline process."""
    deadline = time.monotonic() + timeout_s
    first = _receive(connection, _HELLO.size, deadline, _MAGIC)
    _require_own_job(connection, first)
    if first.startswith(_MAGIC):
        _send(connection, _ENCRYPTED_ONLY, deadline)
    raise AuthenticationError(
        f"{_name_of(connection)} connected without encryption, which this job requires between machines; expected TLS. "
        "Start it with --security encrypt or PACELINE_SECURITY=encrypt"
    )


def _require_own_job(connection: Connection, first: bytes) -> None:
    if first.startswith(struct.pack("<8s8s", _MAGIC, _RUNNING.encode())):
        raise ForeignJobError(f"{_name_of(connection)} reports a running job that has another secret")


def _digest(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


def _name_of(connection: Connection) -> str:
    try:
        peer = connection.getpeername()
    except OSError:
        return "the other end"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else repr(peer) if peer else "a Unix socket"


def _left(connection: Connection, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise HandshakeUnfinishedError(f"{_name_of(connection)} did not finish the handshake in time")
    return left


def _send(connection: Connection, data: bytes, deadline: float) -> None:
    try:
        connection.settimeout(_left(connection, deadline))
        connection.sendall(data)
    except OSError as error:
        raise _interrupted_handshake(connection, error) from error


def _receive(connection: Connection, nbytes: int, deadline: float, expected: bytes = b"") -> bytes:
    """Receives `nbytes` bytes and checks that they begin with `expected`, even if the connection closes early."""
    data = b""
    while len(data) < nbytes:
        lost: OSError | None = None
        try:
            connection.settimeout(_left(connection, deadline))
            more = connection.recv(nbytes - len(data))
        except OSError as error:
            more, lost = b"", error
        if not more:
            is_closed = lost is None or isinstance(lost, ConnectionError)
            if is_closed and expected and data[: len(expected)] != expected[: len(data)]:
                raise AuthenticationError(
                    f"{_name_of(connection)} uses a protocol other than Paceline's, and closed the connection"
                ) from lost
            if lost is not None:
                raise _interrupted_handshake(connection, lost) from lost
            raise PeerGoneError(
                f"{_name_of(connection)} closed the connection during the handshake: its process has ended, or is not "
                "a Paceline process"
            )
        data += more
    return data


def _interrupted_handshake(connection: Connection, error: OSError) -> HandshakeUnfinishedError:
    kind = PeerGoneError if isinstance(error, ConnectionError) else HandshakeUnfinishedError
    return kind(f"{_name_of(connection)} aborted the handshake ({error})")
