"""Logs the connections that a listener refuses: a few in full, the rest as a count."""

from __future__ import annotations

import logging
import threading
import time

SHOWN = 3
PERIOD_S = 10.0
MAX_COUNTED_ADDRESSES = 1000  # further addresses are not counted, so that a flood does not fill memory

_log = logging.getLogger(__name__)


class Refusals:
    """The refused connections of one listener.

    The first `SHOWN` are logged with their reasons. Further ones are counted and summed up in one line every
    `PERIOD_S` seconds, until a period passes without any.

    Args:
        channel: what the connections were for.
        period_s: the seconds that one summary covers.
    """

    def __init__(self, channel: str, period_s: float = PERIOD_S) -> None:
        self._channel = channel
        self._period_s = period_s
        self._changing = threading.Lock()
        self._shown = 0
        self._counted = 0
        self._addresses: set[str] = set()
        self._began_s = self._latest_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self._closed = False

    def add(self, address: str, reason: object) -> None:
        """Logs or counts a refused connection from `address`, which is without its port."""
        with self._changing:
            now_s = time.monotonic()
            if self._timer is None and now_s - self._latest_s > self._period_s:
                self._shown = 0
            self._latest_s = now_s
            is_shown = self._shown < SHOWN
            if is_shown:
                self._shown += 1
            else:
                self._count(address, now_s)
        if is_shown:
            _log.warning("a connection for %r was refused: %s", self._channel, reason)

    def close(self) -> None:
        """Logs what has been counted so far; idempotent."""
        with self._changing:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._sum_up()

    def _count(self, address: str, now_s: float) -> None:
        if self._counted == 0:
            self._began_s = now_s
        self._counted += 1
        if len(self._addresses) < MAX_COUNTED_ADDRESSES:
            self._addresses.add(address)
        if self._timer is None and not self._closed:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._period_s, self._sum_up)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no more threads can be started: the next refusal tries again
            self._timer = None

    def _sum_up(self) -> None:
        with self._changing:
            count, addresses = self._counted, len(self._addresses)
            passed_s = time.monotonic() - self._began_s
            self._counted = 0
            self._addresses.clear()
            self._timer = None
            if count and not self._closed:
                self._start_timer()
        if count:
            _log.warning(
                "refused %d more connection%s for %r from %s%d address%s in the last %.0f s",
                count,
                "" if count == 1 else "s",
                self._channel,
                "at least " if addresses >= MAX_COUNTED_ADDRESSES else "",
                addresses,
                "" if addresses == 1 else "es",
                max(1.0, passed_s),
            )
