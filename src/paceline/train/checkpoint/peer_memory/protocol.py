"""What workers and vaults tell each other: each message is a length, then JSON, then `nbytes` bytes if it says so."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from paceline.comm.security.encryption import Connection
from paceline.comm.security.untrusted_peers import decode_untrusted

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]

CHANNEL = "copies"
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 24  # of the JSON


class GetAddress(msgspec.Struct, frozen=True, tag=True):
    """A worker of this host asks where workers of other hosts reach the vault; the answer is an `Address`."""


class CacheAddress(msgspec.Struct, frozen=True, tag=True):
    """The vault's identity, and HOST:PORT; that is empty if the job has one machine."""

    vault: str
    address: str


class BeginCopy(msgspec.Struct, frozen=True, tag=True):
    """A worker is about to write `nbytes` of a checkpoint; all others of this root go, except the one to `keep`."""

    root: str
    token: str
    sequence: int
    step: int | None
    keep: str | None
    nbytes: Count


class Write(msgspec.Struct, frozen=True, tag=True):
    """The next `nbytes` of a file follow; there is no answer."""

    root: str
    token: str
    file: str
    nbytes: Count


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The file is complete, with so many bytes."""

    root: str
    token: str
    file: str
    total: Count


class Commit(msgspec.Struct, frozen=True, tag=True):
    """All ranks have written; the manifest follows.

    `files` are the sizes of all files of the checkpoint, and `vaults` say where they are: by identity, HOST:PORT.
    """

    root: str
    token: str
    files: Mapping[str, int]
    vaults: Mapping[str, str]
    nbytes: Count


class ListCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """A worker asks what there is of a root; the answer is an `Inventory`."""

    root: str


class CachedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint of which a vault has `held` files; `files` are those of the whole, None if it was not committed."""

    token: str
    sequence: int
    step: int | None
    held: Mapping[str, int]
    files: Mapping[str, int] | None = None
    vaults: Mapping[str, str] = {}


class Inventory(msgspec.Struct, frozen=True, tag=True):
    """What a vault has of a root."""

    vault: str
    address: str
    entries: Sequence[CachedCheckpoint]


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for a manifest; the answer is `Bytes`."""

    root: str
    token: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for bytes of a file; the answer is `Bytes`, fewer than asked for only at the file's end."""

    root: str
    token: str
    file: str
    at: Count
    count: Count


class Bytes(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow."""

    nbytes: Count


class Done(msgspec.Struct, frozen=True, tag=True):
    """What was asked for has been done."""


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """What was asked for cannot be done, or the file is not there."""

    reason: str


Request = GetAddress | BeginCopy | Write | Finish | Commit | ListCheckpoints | GetManifest | Read
Answer = CacheAddress | Inventory | Bytes | Done | RequestRefused
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def send(connection: Connection, message: Request | Answer, views: Sequence[bytes | memoryview] = ()) -> None:
    """Sends a message, and the bytes that it announces."""
    body = msgspec.json.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)
    for view in views:
        connection.sendall(view)


def receive_request(connection: Connection) -> Request | None:
    """Returns the next request; None if the worker has closed the connection.

    Raises:
        ValueError: it is no request.
        OSError: the connection is broken.
    """
    length = bytearray(_LENGTH.size)
    first = connection.recv_into(memoryview(length))
    if first == 0:
        return None
    receive_into(connection, memoryview(length)[first:])
    return decode_untrusted(_requests.decode, _body(connection, length))


def receive_answer(connection: Connection) -> Answer:
    """Returns the answer to a request.

    Raises:
        ValueError: it is no answer.
        OSError: the connection is broken.
    """
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length))
    return decode_untrusted(_answers.decode, _body(connection, length))


def _body(connection: Connection, length: bytearray) -> bytearray:
    (size,) = _LENGTH.unpack(length)
    if size > _LONGEST:
        raise ValueError(f"a message of {size} bytes is longer than {_LONGEST}")
    body = bytearray(size)
    receive_into(connection, memoryview(body))
    return body


def receive_into(connection: Connection, buffer: memoryview) -> None:
    """Fills a buffer with what comes.

    Raises:
        ConnectionError: the other end closed the connection before.
        OSError: the connection is broken.
    """
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        buffer = buffer[count:]
