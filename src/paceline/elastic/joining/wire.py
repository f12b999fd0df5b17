"""What a learner and a donor's child send each other, after both have proved the job's secret.

A request is a fixed struct. An answer is a frame: the length of its head, how many results the donor has beyond, the
head (msgpack), and a body whose length the head says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec
import xxhash

from paceline.elastic.dealings import Dealt
from paceline.security.encryption import Connection
from paceline.security.received import decoded

CHANNEL = "lesson"  # of the handshake
CHUNK_BYTES = 4 << 20
NEAR = 1  # results behind the others with which a learner counts as having caught up
REQUEST = struct.Struct("<QQQQ")  # an Ask and three numbers
FRAME = struct.Struct("<QQ")
_LARGEST_HEAD = 1 << 30


class Ask(IntEnum):
    """What a learner asks for."""

    CHUNK = 1  # of this number
    ITEM = 2  # what the log has next for this round, after a view of this generation and so many steps
    FORGET = 3  # nothing: it has all of the rounds before this one, and so many steps of this one


class _Head(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The head of a frame."""


class Contents(_Head, frozen=True):
    """What a snapshot holds: the encoded state without its buffers, and the buffers' lengths in bytes.

    Attributes:
        round: the round that comes next.
        committed: the digest of the result of the round before.
        dealt: the latest batch that was dealt out.
        body, sizes: see above.
    """

    round: int
    committed: int
    dealt: Dealt
    body: bytes
    sizes: tuple[int, ...]


class Chunk(_Head, frozen=True):
    """A part of the buffers, taken together; the body has its bytes."""

    number: int
    nbytes: int
    digest: bytes


class Result(_Head, frozen=True):
    """The result of a round, which was committed.

    Attributes:
        round: the round.
        nbytes: the length of the body: the tensors, contiguous. In the usual loop there are none.
        tensors: their dtypes and shapes.
        digest: of the result.
        state: the members' digest of a part of their state before the round.
        dealt: the latest batch that was dealt out.
        before: the digest of the result of the round before.
    """

    round: int
    nbytes: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    digest: int
    state: int
    dealt: Dealt
    before: int = 0


class Stepped(_Head, frozen=True):
    """A step of an optimizer in the usual loop, as it is about to be made.

    Attributes:
        round: the round that comes next.
        after: the digest of the result of the round before.
        optimizer: its name.
        nbytes: the length of the body: the gradients, and then tensors of the options, contiguous.
        tensors: their dtypes and shapes.
        has_gradient: for each parameter in the order of the groups, whether it has a gradient.
        options: those of the groups, such as the learning rate, encoded.
        obstacle: why the step does not follow from all this, if it does not.
        digest: of the body; whoever sends it adds that.
    """

    round: int
    after: int
    optimizer: str
    nbytes: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_gradient: tuple[bool, ...] = ()
    options: bytes = b""
    obstacle: str = ""
    digest: bytes = b""


class Entered(_Head, frozen=True):
    """The members of the donor's view enter another view before the round."""

    round: int
    generation: int
    members: tuple[str, ...]


class NothingYet(_Head, frozen=True):
    """The learner has caught up: the donor has nothing that it asks for, and sends that as soon as it has."""


Item = Result | Stepped | Entered
Head = Contents | Chunk | Result | Stepped | Entered | NothingYet
_heads = msgspec.msgpack.Decoder(Head)


class BrokenLessonError(Exception):
    """A donor sent something else than it should, or nothing any more."""


def encode_head(head: Head) -> bytes:
    """Returns a head as bytes."""
    return msgspec.msgpack.encode(head)


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Returns a head that was received.

    Raises:
        BrokenLessonError: it is none.
    """
    try:
        head: Head = decoded(_heads.decode, data)
    except ValueError as error:
        raise BrokenLessonError(f"a head that cannot be read: {error}") from error
    return head


def body_bytes(head: Head) -> int:
    """Returns the length of the body that follows a head."""
    return head.nbytes if isinstance(head, (Chunk, Result, Stepped)) else 0


def digest_of_chunk(parts: Sequence[memoryview]) -> bytes:
    """Returns the digest (XXH3, 128 bits) of a chunk."""
    total = xxhash.xxh3_128(seed=0)
    for part in parts:
        total.update(part)
    return total.digest()


def send_head(connection: Connection, head: Head, ahead: int = 0) -> None:
    """Sends a frame without its body."""
    data = encode_head(head)
    connection.sendall(FRAME.pack(len(data), ahead) + data)


def receive_head(connection: Connection) -> tuple[Head, int]:
    """Receives a frame up to its body; returns the head, and how many results the donor has beyond.

    Raises:
        BrokenLessonError, OSError: the donor is gone, or sent something else.
    """
    prefix = memoryview(bytearray(FRAME.size))
    receive_into(connection, prefix)
    length, ahead = FRAME.unpack(prefix)
    if length > _LARGEST_HEAD:
        raise BrokenLessonError(f"a head of {length} bytes")
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return decode_head(data), ahead


def receive_into(connection: Connection, memory: memoryview) -> None:
    """Fills `memory` with what comes next.

    Raises:
        BrokenLessonError, OSError: the other end is gone.
    """
    at = 0
    while at < len(memory):
        count = connection.recv_into(memory[at:])
        if not count:
            raise BrokenLessonError("the connection was closed")
        at += count
