"""Makes a picture of the job again and again while somebody looks, and hands each change to every viewer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from paceline.observe.live.board import Board
from paceline.observe.live.feed import Feed, Message
from paceline.observe.live.picture import Picture
from paceline.observe.live.sample import Sample

Look = Callable[[], Sample]

WATCHED_S = 1.0  # between two samples while somebody looks
ALONE_S = 5.0  # and while nobody does, so that curves and the log have no holes
_REMEMBERED_S = 10.0  # so long after a picture was asked for, as `paceline top` does, somebody is said to look
_QUEUED = 30  # messages that a slow viewer may be behind before it gets a snapshot instead


class Viewer:
    """One open page."""

    def __init__(self, feed: Feed, first: list[Message]) -> None:
        self._feed = feed
        self._queue: asyncio.Queue[Message] = asyncio.Queue()
        for message in first:
            self._queue.put_nowait(message)

    def put(self, message: Message) -> None:
        """Adds a message; one who is far behind gets a snapshot in place of all that waits."""
        if self._queue.qsize() >= _QUEUED:
            while not self._queue.empty():
                self._queue.get_nowait()
            message = self._feed.snapshot()
        self._queue.put_nowait(message)

    async def next(self) -> bytes:
        """Waits for the next server-sent event."""
        return self._feed.event(await self._queue.get())


class Hub:
    """Runs in one event loop. `look` takes a sample of the job, in that loop's thread."""

    def __init__(self, look: Look, life: str) -> None:
        self._look = look
        self._board = Board()
        self._feed = Feed(life)
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._taken_s = float("-inf")
        self._asked_s = float("-inf")
        self.picture: Picture | None = None

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

    def hurry(self) -> None:
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
