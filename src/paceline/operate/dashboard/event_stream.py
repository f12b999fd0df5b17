"""Turns pictures into the messages of a stream: a snapshot for who comes, then what has changed.

A message is one JSON object whose keys are those of `Picture`. A key that is absent has not changed; `null` says that
there is none any more. A list that grows is `{"epoch", "first", "from", "items"}`: the viewer drops what it has from
number `from` on and before `first`, and appends the items. With another epoch it drops everything.

Makes a picture of the job again and again while somebody looks, and hands each change to every viewer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState, Growing
from paceline.operate.dashboard.job_sample import JobSample

_KEPT = 120  # messages for viewers who come back

_encode = msgspec.json.Encoder().encode
_NAMES = tuple(field.name for field in fields(DashboardState))


@dataclass(frozen=True)
class StreamMessage:
    """One message; `number` is its event id, and `data` its JSON in one line."""

    number: int
    data: bytes
    is_snapshot: bool = False


class Feed:
    """The messages of one job. It is not for several threads at once."""

    def __init__(self, life: str) -> None:
        """Begins a feed; `life` tells this server's numbers from those of one before it at the same address."""
        self.life = life
        self._picture: DashboardState | None = None
        self._messages: deque[StreamMessage] = deque(maxlen=_KEPT)
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the latest message, 0 if there is none."""
        return self._number

    def publish(self, picture: DashboardState) -> StreamMessage | None:
        """Makes the message that leads from the last picture to this one; None if nothing has changed."""
        changed = changes(self._picture, picture)
        self._picture = picture
        if not changed:
            return None
        self._number += 1
        message = StreamMessage(self._number, _encode(changed))
        self._messages.append(message)
        return message

    def since(self, last_id: str | None) -> list[StreamMessage]:
        """Returns what a viewer needs who has seen the message of this event id last: the rest, or a snapshot."""
        life, _, number = (last_id or "").rpartition("-")
        if life == self.life and number.isdecimal():
            seen = int(number)
            oldest = self._messages[0].number if self._messages else self._number + 1
            if oldest - 1 <= seen <= self._number:
                return [each for each in self._messages if each.number > seen]
        return [self.snapshot()]

    def snapshot(self) -> StreamMessage:
        """Returns the whole picture as one message."""
        whole = {} if self._picture is None else changes(None, self._picture)
        return StreamMessage(self._number, _encode(whole), is_snapshot=True)

    def event(self, message: StreamMessage) -> bytes:
        """Returns the message as a server-sent event."""
        kind = b"snapshot" if message.is_snapshot else b"change"
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self.life.encode(), message.number, kind, message.data)


def changes(before: DashboardState | None, after: DashboardState) -> dict[str, Any]:
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


Look = Callable[[], JobSample]

WATCHED_S = 1.0  # between two samples while somebody looks
ALONE_S = 5.0  # and while nobody does, so that curves and the log have no holes
_REMEMBERED_S = 10.0  # so long after a picture was asked for, as `paceline top` does, somebody is said to look
_QUEUED = 30  # messages that a slow viewer may be behind before it gets a snapshot instead


class Viewer:
    """One open page."""

    def __init__(self, feed: Feed, first: list[StreamMessage]) -> None:
        self._feed = feed
        self._queue: asyncio.Queue[StreamMessage] = asyncio.Queue()
        for message in first:
            self._queue.put_nowait(message)

    def put(self, message: StreamMessage) -> None:
        """Adds a message; one who is far behind gets a snapshot in place of all that waits."""
        if self._queue.qsize() >= _QUEUED:
            while not self._queue.empty():
                self._queue.get_nowait()
            message = self._feed.snapshot()
        self._queue.put_nowait(message)

    async def next(self) -> bytes:
        """Waits for the next server-sent event."""
        return self._feed.event(await self._queue.get())


class Broadcaster:
    """Runs in one event loop. `look` takes a sample of the job, in that loop's thread."""

    def __init__(self, look: Look, life: str) -> None:
        self._look = look
        self._board = DashboardAggregator()
        self._feed = Feed(life)
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._taken_s = float("-inf")
        self._asked_s = float("-inf")
        self.picture: DashboardState | None = None

    @property
    def is_watched(self) -> bool:
        """Whether a page is open, or somebody has asked for a picture lately."""
        return bool(self._viewers) or time.monotonic() - self._asked_s < _REMEMBERED_S

    async def run(self) -> None:
        """Samples the job until it is cancelled."""
        while True:
            self.sample()
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), WATCHED_S if self._viewers else ALONE_S)
            except asyncio.TimeoutError:
                continue

    def sample(self) -> None:
        """Takes a sample now, and tells the viewers what has changed."""
        self._board.take(self._look())
        self.picture = self._board.picture()
        self._taken_s = time.monotonic()
        message = self._feed.publish(self.picture)
        if message is not None:
            for viewer in self._viewers:
                viewer.put(message)

    def request_sample(self) -> None:
        """Makes `run` take the next sample at once."""
        self._wake.set()

    async def fresh(self) -> bytes:
        """Returns a picture that is no older than a second, as JSON."""
        self._asked_s = time.monotonic()
        if self._asked_s - self._taken_s > WATCHED_S:
            self.sample()
        return msgspec.json.encode(self.picture)

    @contextmanager
    def viewer(self, last_id: str | None) -> Iterator[Viewer]:
        """Takes in a viewer who has seen the event `last_id`."""
        if time.monotonic() - self._taken_s > WATCHED_S:
            self.sample()
        viewer = Viewer(self._feed, self._feed.since(last_id))
        self._viewers.add(viewer)
        self._wake.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
