"""Stream of server-sent events to the page's viewers: first a snapshot of the state, then its changes.

A message is one JSON object with the keys of `DashboardState`. Absent keys are unchanged; `null` removes a value. A
growing list is sent as `{"epoch", "first", "from", "items"}`: the viewer drops its items before index `first` and those
at index `from` or later, and appends the new items. If the epoch has changed, the viewer drops all items.
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
from paceline.operate.dashboard.dashboard_state import AppendOnlyList, DashboardState
from paceline.operate.dashboard.job_sample import JobSample

WATCHED_S = 1.0  # interval between samples while there are viewers
ALONE_S = 5.0  # interval between samples without viewers, short enough to avoid gaps in curves and the log
_REMEMBERED_S = 10.0  # time during which a request for the state, e.g. from `paceline top`, counts as a viewer
_QUEUED = 30  # number of messages by which a viewer can lag before it receives a snapshot instead
_KEPT = 120  # number of messages kept for viewers that reconnect

_encode = msgspec.json.Encoder().encode
_NAMES = tuple(field.name for field in fields(DashboardState))


@dataclass(frozen=True)
class StreamMessage:
    """A message in the stream. `number` is part of its event id, and `data` is its JSON on one line."""

    number: int
    data: bytes
    is_snapshot: bool = False


class Feed:
    """The messages about one job. Not thread-safe.

    Args:
        life: a name that distinguishes this server's event ids from those issued by an earlier server at the same
            address.
    """

    def __init__(self, life: str) -> None:
        self.life = life
        self._state: DashboardState | None = None
        self._messages: deque[StreamMessage] = deque(maxlen=_KEPT)
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the latest message; 0 if there is none."""
        return self._number

    def publish(self, state: DashboardState) -> StreamMessage | None:
        """Returns a message with the changes since the previous state, or None if nothing has changed."""
        changed = changes(self._state, state)
        self._state = state
        if not changed:
            return None
        self._number += 1
        message = StreamMessage(self._number, _encode(changed))
        self._messages.append(message)
        return message

    def since(self, last_id: str | None) -> list[StreamMessage]:
        """Returns the messages after this event id, or a snapshot if they are no longer available."""
        life, _, number = (last_id or "").rpartition("-")
        if life == self.life and number.isdecimal():
            seen = int(number)
            oldest = self._messages[0].number if self._messages else self._number + 1
            if oldest - 1 <= seen <= self._number:
                return [message for message in self._messages if message.number > seen]
        return [self.snapshot()]

    def snapshot(self) -> StreamMessage:
        """Returns the whole state as one message."""
        whole = {} if self._state is None else changes(None, self._state)
        return StreamMessage(self._number, _encode(whole), is_snapshot=True)

    def event(self, message: StreamMessage) -> bytes:
        """Returns the message as a server-sent event."""
        kind = b"snapshot" if message.is_snapshot else b"change"
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self.life.encode(), message.number, kind, message.data)


def changes(before: DashboardState | None, after: DashboardState) -> dict[str, Any]:
    """Returns the content of a message that describes the changes from `before` to `after`."""
    changed: dict[str, Any] = {}
    for name in _NAMES:
        new = getattr(after, name)
        old = getattr(before, name) if before is not None else None
        if isinstance(new, AppendOnlyList):
            part = _growth(old if isinstance(old, AppendOnlyList) else None, new)
            if part is not None:
                changed[name] = part
        elif new is not old and (before is None or new != old):
            changed[name] = new
    return changed


def _growth(old: AppendOnlyList[Any] | None, new: AppendOnlyList[Any]) -> dict[str, Any] | None:
    if old is new:
        return None
    if old is None or old.epoch != new.epoch or old.end < new.first:
        begin = new.first
    elif old.end == new.end:
        return None
    else:
        begin = old.end
    return {"epoch": new.epoch, "first": new.first, "from": begin, "items": new.items[begin - new.first :]}


class Viewer:
    """A queue of messages for one open page."""

    def __init__(self, feed: Feed, first: list[StreamMessage]) -> None:
        self._feed = feed
        self._queue: asyncio.Queue[StreamMessage | None] = asyncio.Queue()
        for message in first:
            self._queue.put_nowait(message)

    def put(self, message: StreamMessage) -> None:
        """Adds a message. If the viewer lags too far behind, all queued messages are replaced with a snapshot."""
        if self._queue.qsize() >= _QUEUED:
            while not self._queue.empty():
                self._queue.get_nowait()
            message = self._feed.snapshot()
        self._queue.put_nowait(message)

    def end(self) -> None:
        """Closes the stream after the queued messages."""
        self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        """Waits for the next server-sent event. Returns None at the end of the stream."""
        message = await self._queue.get()
        return None if message is None else self._feed.event(message)


class Broadcaster:
    """Samples the job in an event loop and sends each change to every viewer.

    Args:
        look: a function that takes a sample of the job; called on the event loop's thread.
        life: the server's name in event ids; see `Feed`.
    """

    def __init__(self, look: Callable[[], JobSample], life: str) -> None:
        self._look = look
        self._aggregator = DashboardAggregator()
        self._feed = Feed(life)
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._taken_s = float("-inf")
        self._requested_s = float("-inf")
        self._has_ended = False
        self.state: DashboardState | None = None

    @property
    def is_watched(self) -> bool:
        """Whether a page is open or the state was requested recently."""
        return bool(self._viewers) or time.monotonic() - self._requested_s < _REMEMBERED_S

    async def run(self) -> None:
        """Samples the job until this task is cancelled."""
        while True:
            self.sample()
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), WATCHED_S if self._viewers else ALONE_S)
            except asyncio.TimeoutError:
                continue

    def sample(self) -> None:
        """Takes a sample immediately and sends the changes to the viewers."""
        self._aggregator.take(self._look())
        self.state = self._aggregator.state()
        self._taken_s = time.monotonic()
        message = self._feed.publish(self.state)
        if message is not None:
            for viewer in self._viewers:
                viewer.put(message)

    def end(self) -> None:
        """Closes the streams of all viewers. Streams opened later are closed after a snapshot."""
        self._has_ended = True
        for viewer in self._viewers:
            viewer.end()

    def request_sample(self) -> None:
        """Causes `run` to take the next sample immediately."""
        self._wake.set()

    async def fresh(self) -> bytes:
        """Returns a state that is at most one second old, as JSON."""
        self._requested_s = time.monotonic()
        if self._requested_s - self._taken_s > WATCHED_S:
            self.sample()
        return msgspec.json.encode(self.state)

    @contextmanager
    def viewer(self, last_id: str | None) -> Iterator[Viewer]:
        """Context manager that registers a viewer whose latest event is `last_id`."""
        if time.monotonic() - self._taken_s > WATCHED_S:
            self.sample()
        viewer = Viewer(self._feed, self._feed.since(last_id))
        if self._has_ended:
            viewer.end()
        self._viewers.add(viewer)
        self._wake.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
