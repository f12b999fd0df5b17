"""Objects as bytes and back: msgpack, and beside it the memory of tensors, arrays and long bytes as it is.

An object comes back equal and of the same type, or is refused before anything is sent. A body is one byte (`Form`) and
then msgpack or, if the sender allowed it, a pickle. Reading msgpack makes nothing but the kinds of
`builtin_kinds.py` and `array_kinds.py`: no class is looked up by name, no code is run.

What is not kept: that two places held the same object (each gets its own), and how a tensor's elements were laid out
(they arrive contiguous).
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
    """How a body is written; its first byte."""

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
    """The bytes of `value`, which messages call `name`.

    Raises:
        TypeError: it holds what does not travel and `allow_pickle` is off; the message names that and its path.
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
    """The object that `encode` turned into `body` and `buffers`, whose memory it may share.

    Raises:
        MalformedPayload: there is no such object.
        PickleRefused: it is a pickle and `allow_pickle` is off.
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
    except Exception as error:  # what comes from another process may break any rule
        raise MalformedPayload(f"{type(error).__name__}: {error}") from error
    raise MalformedPayload(f"the first byte is {form}")


def _tag_of(kind: type) -> int | None:
    return _TAGS.get(kind) or numpy_tag(kind)
