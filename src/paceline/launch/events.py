"""Writes a job's events as lines of JSON: into its directory, and for `--event-log-handler console` to stderr."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from paceline.launch.output import Console
from paceline.observe.live.story import Fact
from paceline.observe.runs import EVENTS_FILE
from paceline.security.own_files import append_to

Listener = Callable[[str, dict[str, Fact]], None]


class Events:
    """Writes events into the job's directory, if it has one, and to stderr if `is_on`; tells them to `listener`."""

    def __init__(
        self,
        is_on: bool,
        run_id: str,
        console: Console,
        directory: Path | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._is_on = is_on
        self._run_id = run_id
        self._write = console.writer(2)
        self._file = None if directory is None else directory / EVENTS_FILE
        self._listener = listener

    def tell(self, event: str, **facts: Fact) -> None:
        """Writes one event: what happened, when, where, and its facts."""
        if self._listener is not None:
            self._listener(event, facts)
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
            with contextlib.suppress(OSError), open(append_to(str(self._file)), "ab") as file:
                file.write(text)
