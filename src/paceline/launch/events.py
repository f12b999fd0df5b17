"""Writes a job's events as lines of JSON to stderr, for `--event-log-handler console`."""

from __future__ import annotations

import json
import socket
import time

from paceline.launch.output import Console


class Events:
    """Writes events if `is_on`, otherwise nothing."""

    def __init__(self, is_on: bool, run_id: str, console: Console) -> None:
        self._is_on = is_on
        self._run_id = run_id
        self._write = console.writer(2)

    def tell(self, event: str, **facts: str | int | list[int]) -> None:
        """Writes one event: what happened, when, where, and its facts."""
        if self._is_on:
            line = {
                "event": event,
                "time_s": round(time.time(), 3),
                "host": socket.gethostname(),
                "run_id": self._run_id,
                **facts,
            }
            self._write(json.dumps(line).encode() + b"\n")
