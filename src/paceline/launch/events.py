"""Writes a job's events as lines of JSON: into its directory, and for `--event-log-handler console` to stderr."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

from paceline.launch.output import Console
from paceline.observe.runs import EVENTS_FILE


class Events:
    """Writes events into the job's directory, if it has one, and to stderr if `is_on`."""

    def __init__(self, is_on: bool, run_id: str, console: Console, directory: Path | None = None) -> None:
        self._is_on = is_on
        self._run_id = run_id
        self._write = console.writer(2)
        self._file = None if directory is None else directory / EVENTS_FILE

    def tell(self, event: str, **facts: str | int | list[int]) -> None:
        """Writes one event: what happened, when, where, and its facts."""
        line = {
            "event": event,
            "time_s": round(time.time(), 3),
            "host": socket.gethostname(),
            "run_id": self._run_id,
            **facts,
        }
        text = json.dumps(line).encode() + b"\n"
        if self._is_on:
            self._write(text)
        if self._file is not None:
            with contextlib.suppress(OSError), self._file.open("ab") as file:
                file.write(text)
