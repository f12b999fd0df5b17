"""Converts objects to bytes and back: msgpack, and beside it the memory of tensors, arrays and long bytes as it is.

An object comes back equal and of the same type, or is refused before anything is sent. A body is one byte (`Form`)
followed by msgpack or, if the sender allowed it, a pickle. Reading msgpack creates only the kinds of `builtin_kinds.py`
and `array_kinds.py`: no class is looked up by name, and no code is run.

Two things are lost: an object that appears twice arrives as two objects, and tensors arrive contiguous, whatever their
layout was.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import torch

from paceline.group.objects.array_kinds import ARRAYS, numpy_tag
from paceline.group.objects.builtin_kinds import VALUES
from paceline.group.objects.codec import MalformedPayload, Packer, Refused, Unpacker, stands_for_itself

_KINDS = {**VALUES, **ARRAYS}
_TAGS = {kind.type: tag for tag, kind in _KINDS.items() if kind.type is not None}


class Form(IntEnum):
    """The format of a body, given by its first byte."""

    MSGPACK = 1
    PICKLE = 2


class PickleRefused(ValueError):
    """The bytes are a pickle, and pickles are not allowed."""


@dataclass(frozen=True)
class Encoded:
    """An object's bytes: `body`, and one-dimensional uint8 tensors that may share the object's memory."""

    body: bytearray
    buffers: list[torch.Tensor]


def encode(value: object, name: str, allow_pickle: bool = False) -> Encoded:
    """Returns the bytes of `value`; messages refer to it as `name`.

    Raises:
        TypeError: it holds something that cannot be sent and `allow_pickle` is off; the message says what and where.
    """
    packer = Packer(_KINDS, _tag_of)
    try:
        body = bytearray([Form.MSGPACK])
        msgspec.msgpack.Encoder().encode_into(value if stands_for_itself(value) else packer.pack(value), body, -1)
        return Encoded(body, packer.buffers)
    except Refused as refused:
        if allow_pickle:
            return Encoded(bytearray([Form.PICKLE]) + pickle.dumps(value), [])
        raise TypeError(f"{name}{''.join(reversed(refused.path))} is {refused}") from None


def decode(body: bytes | memoryview, buffers: Sequence[torch.Tensor], allow_pickle: bool = False) -> object:
    """Returns the object that `encode` turned into `body` and `buffers`, whose memory it may share.

    Raises:
        MalformedPayload: the bytes do not encode an object.
        PickleRefused: the body is a pickle and `allow_pickle` is off.
    """
    form = body[0] if len(body) else 0
    if form == Form.PICKLE and not allow_pickle:
        raise PickleRefused("the object is pickled")
    try:
        if form == Form.PICKLE:
            return pickle.loads(body[1:])
        if form == Form.MSGPACK:
            tree = msgspec.msgpack.decode(body[1:])
            return tree if stands_for_itself(tree) else Unpacker(_KINDS, buffers).unpack(tree)
    except Exception as error:  # data from another process may be malformed in any way
        raise MalformedPayload(f"{type(error).__name__}: {error}") from error
    raise MalformedPayload(f"the first byte is {form}")


def _tag_of(kind: type) -> int | None:
    return _TAGS.get(kind) or numpy_tag(kind)
