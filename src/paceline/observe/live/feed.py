"""Turns pictures into the messages of a stream: a snapshot for who comes, then what has changed.

A message is one JSON object whose keys are those of `Picture`. A key that is absent has not changed; `null` says that
there is none any more. A list that grows is `{"epoch", "first", "from", "items"}`: the viewer drops what it has from
number `from` on and before `first`, and appends the items. With another epoch it drops everything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from paceline.observe.live.picture import Growing, Picture

_KEPT = 120  # messages for viewers who come back

_encode = msgspec.json.Encoder().encode
_NAMES = tuple(field.name for field in fields(Picture))


@dataclass(frozen=True)
class Message:
    """One message; `number` is its event id, and `data` its JSON in one line."""

    number: int
    data: bytes
    is_snapshot: bool = False


class Feed:
    """The messages of one job. It is not for several threads at once."""

    def __init__(self, life: str) -> None:
        """Begins a feed; `life` tells this server's numbers from those of one before it at the same address."""
        self.life = life
        self._picture: Picture | None = None
        self._messages: deque[Message] = deque(maxlen=_KEPT)
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the latest message, 0 if there is none."""
        return self._number

    def publish(self, picture: Picture) -> Message | None:
        """Makes the message that leads from the last picture to this one; None if nothing has changed."""
        changed = changes(self._picture, picture)
        self._picture = picture
        if not changed:
            return None
        self._number += 1
        message = Message(self._number, _encode(changed))
        self._messages.append(message)
        return message

    def since(self, last_id: str | None) -> list[Message]:
        """Returns what a viewer needs who has seen the message of this event id last: the rest, or a snapshot."""
        life, _, number = (last_id or "").rpartition("-")
        if life == self.life and number.isdecimal():
            seen = int(number)
            oldest = self._messages[0].number if self._messages else self._number + 1
            if oldest - 1 <= seen <= self._number:
                return [each for each in self._messages if each.number > seen]
        return [self.snapshot()]

    def snapshot(self) -> Message:
        """Returns the whole picture as one message."""
        whole = {} if self._picture is None else changes(None, self._picture)
        return Message(self._number, _encode(whole), is_snapshot=True)

    def event(self, message: Message) -> bytes:
        """Returns the message as a server-sent event."""
        kind = b"snapshot" if message.is_snapshot else b"change"
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self.life.encode(), message.number, kind, message.data)


def changes(before: Picture | None, after: Picture) -> dict[str, Any]:
    """Returns the keys of a message that leads from `before` to `after`."""
    changed: dict[str, Any] = {}
    for name in _NAMES:
        new = getattr(after, name)
        old = getattr(before, name) if before is not None else None
        if isinstance(new, Growing):
            part = _growth(old if isinstance(old, Growing) else None, new)
            if part is not None:
                changed[name] = part
        elif new is not old and (before is None or new != old):
            changed[name] = new
    return changed


def _growth(old: Growing[Any] | None, new: Growing[Any]) -> dict[str, Any] | None:
    if old is new:
        return None
    if old is None or old.epoch != new.epoch or old.end < new.first:
        begin = new.first
    elif old.end == new.end:
        return None
    else:
        begin = old.end
    return {"epoch": new.epoch, "first": new.first, "from": begin, "items": new.items[begin - new.first :]}
