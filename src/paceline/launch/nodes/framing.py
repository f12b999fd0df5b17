"""How messages travel between launchers: each is a length, then JSON. Nothing that is received is executed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import get_args

from paceline import __version__
from paceline.launch.failures import Failure, Record
from paceline.launch.nodes.messages import Join, Message, Order, Report

LARGEST = 1 << 22
_LENGTH = struct.Struct("<I")

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (*get_args(Report), *get_args(Order))}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
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
        MessageError: `body` is no message, or a field has another type.
    """
    try:
        content = json.loads(body)
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
        raise TypeError(f"{value!r} is not {kind}")
    return value


def _failure(value: object) -> Failure:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a failure")
    record = value.pop("record")
    failure = Failure(**value, record=None if record is None else Record(**record))
    numbers = (failure.rank, failure.pid, failure.exit_code, failure.seen_s)
    texts = (
        failure.host,
        failure.memory or "",
        failure.log or "",
        *(() if failure.record is None else (failure.record.kind, failure.record.text)),
    )
    is_sound = all(isinstance(n, (int, float)) for n in numbers) and all(isinstance(text, str) for text in texts)
    if not is_sound or not isinstance(failure.at_exit, bool):
        raise TypeError(f"{value!r} is not a failure")
    return failure


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
