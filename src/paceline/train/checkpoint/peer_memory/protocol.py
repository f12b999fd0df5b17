"""Messages between workers and caches.

A message consists of a length followed by JSON. If the message has the field `nbytes`, that many bytes of data follow.
The fields named `vault` and `vaults` contain the identities of caches.
"""

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
_LONGEST = 1 << 24  # maximum length of the JSON, in bytes


class GetAddress(msgspec.Struct, frozen=True, tag=True):
    """Requests the cache's address for other hosts (`CacheAddress`). Accepted only from workers on this host."""


class CacheAddress(msgspec.Struct, frozen=True, tag=True):
    """Reports the identity of the cache and its address HOST:PORT, which is "" if the job runs on one machine."""

    vault: str
    address: str


class BeginCopy(msgspec.Struct, frozen=True, tag=True):
    """Announces `nbytes` bytes for a checkpoint. The cache drops all other checkpoints for this root except `keep`."""

    root: str
    token: str
    sequence: int
    step: int | None
    keep: str | None
    nbytes: Count


class Write(msgspec.Struct, frozen=True, tag=True):
    """Appends the following `nbytes` bytes to a file. There is no response."""

    root: str
    token: str
    file: str
    nbytes: Count


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Completes a file of `total` bytes."""

    root: str
    token: str
    file: str
    total: Count


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Adds the following manifest to a checkpoint that all ranks have written. This completes the checkpoint.

    `files` contains the sizes of all files in the checkpoint, and `vaults` the addresses of all caches that have some
    of them.
    """

    root: str
    token: str
    files: Mapping[str, int]
    vaults: Mapping[str, str]
    nbytes: Count


class ListCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Requests the `Inventory` for a root."""

    root: str


class CachedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in a cache.

    Attributes:
        held: the sizes of the files in this cache, in bytes, by name.
        files: the sizes of all files in the checkpoint, in bytes, by name, or None until it is committed.
        vaults: the addresses of all caches that have files of the checkpoint, by identity.
    """

    token: str
    sequence: int
    step: int | None
    held: Mapping[str, int]
    files: Mapping[str, int] | None = None
    vaults: Mapping[str, str] = {}


class Inventory(msgspec.Struct, frozen=True, tag=True):
    """Lists the checkpoints for a root in a cache."""

    vault: str
    address: str
    entries: Sequence[CachedCheckpoint]


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """Requests a manifest. The response is `Bytes`."""

    root: str
    token: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Requests bytes from a file. The response is `Bytes`, with fewer bytes than requested only at end of file."""

    root: str
    token: str
    file: str
    at: Count
    count: Count


class Bytes(msgspec.Struct, frozen=True, tag=True):
    """Announces the requested bytes, which follow."""

    nbytes: Count


class RequestCompleted(msgspec.Struct, frozen=True, tag=True):
    """Confirms that a request was carried out."""


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """Reports that a request was refused, and why."""

    reason: str


Request = GetAddress | BeginCopy | Write | Finish | Commit | ListCheckpoints | GetManifest | Read
Answer = CacheAddress | Inventory | Bytes | RequestCompleted | RequestRefused
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def send(connection: Connection, message: Request | Answer, views: Sequence[bytes | memoryview] = ()) -> None:
    """Sends a message and the data that it announces."""
    body = msgspec.json.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)
    for view in views:
        connection.sendall(view)


def receive_request(connection: Connection) -> Request | None:
    """Returns the next request, or None if the worker has closed the connection; raises ValueError for other data."""
    length = bytearray(_LENGTH.size)
    first = connection.recv_into(memoryview(length))
    if first == 0:
        return None
    receive_into(connection, memoryview(length)[first:])
    return decode_untrusted(_requests.decode, _body(connection, length))


def receive_answer(connection: Connection) -> Answer:
    """Returns the answer to a request; raises ValueError for other data."""
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
    """Fills a buffer with received bytes; raises ConnectionError if the other end closes the connection first."""
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        buffer = buffer[count:]
