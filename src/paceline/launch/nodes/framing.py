"""How messages travel between launchers: each is a length, then JSON. Nothing that is received is executed."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import get_args

from paceline import __version__
from paceline.launch.failures import Failure, Record
from paceline.launch.nodes.messages import Join, Message, Order, Report
from paceline.security.received import decoded, writable

LARGEST = 1 << 22
_BEYOND = 1 << 63  # what this many is, neither the system nor struct can take
_LONGEST_SHOWN = 100  # of a value in an error
_LENGTH = struct.Struct("<I")

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (*get_args(Report), *get_args(Order))}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "str | None": (str, type(None)),
    "bool": bool,
    "int | None": (int, type(None)),
    "float": (float, int),
}


class MessageError(ValueError):
    """The peer sent something that is not a message."""


def encode(message: Message) -> bytes:
    """Returns the message after its length."""
    body = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if len(body) > LARGEST:
        raise MessageError(f"a message of {len(body)} bytes is larger than {LARGEST}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Returns the message in `body`.

    Raises:
        MessageError: `body` is no message, or a field has another type or a number that nothing can be counted with.
    """
    try:
        content = decoded(json.loads, body)
        kind = _KINDS[content.pop("kind")]
        known = {each.name: str(each.type) for each in fields(kind)}
        if kind is Join and content.get("version") != __version__:  # to be refused with the reason, whatever it says
            content = {name: value for name, value in content.items() if name in known}
        values = {name: _value(known[name], value) for name, value in content.items()}
        make: Callable[..., Message] = kind
        return make(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MessageError(f"not a message of a launcher ({type(error).__name__}: {error})") from error


def _value(kind: str, value: object) -> object:
    if kind == "Failure":
        return _failure(value)
    if kind.startswith("tuple") and isinstance(value, list):
        inner = kind.removeprefix("tuple[").partition(",")[0].rstrip("]")
        return tuple(_value(inner, each) for each in value)
    expected = _TYPES.get(kind)
    if expected is None or not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError(f"{_shown(value)} is not {kind}")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and -_BEYOND <= value < _BEYOND):
        raise ValueError(f"{_shown(value)} is out of range")
    return writable(value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, (list, dict)) else repr(value)[:_LONGEST_SHOWN]


def _failure(value: object) -> Failure:
    content = _dict(value)
    record = content.pop("record")
    known = {each.name: str(each.type) for each in fields(Failure)}
    values = {name: _value(known[name], each) for name, each in content.items()}
    make: Callable[..., Failure] = Failure
    return make(**values, record=None if record is None else _record(record))


def _record(value: object) -> Record:
    known = {each.name: str(each.type) for each in fields(Record)}
    make: Callable[..., Record] = Record
    return make(**{name: _value(known[name], each) for name, each in _dict(value).items()})


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{_shown(value)} is not an object")
    return value


@dataclass
class Inbox:
    """Splits the received bytes into messages."""

    received: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Message]:
        """Takes more bytes; returns the messages that are complete.

        Raises:
            MessageError: the bytes are no message.
        """
        self.received += data
        messages = []
        while len(self.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.received)
            if length > LARGEST:
                raise MessageError(f"a message of {length} bytes is larger than {LARGEST}")
            if len(self.received) < _LENGTH.size + length:
                break
            body = bytes(self.received[_LENGTH.size : _LENGTH.size + length])
            del self.received[: _LENGTH.size + length]
            messages.append(decode(body))
        return messages
