"""Where the streams of each worker go: the console, files by attempt and rank, or both."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.job import Output
from paceline.launch.output import Console, LinePrefixer, LogFile, Stream, only_with, prefix_of
from paceline.launch.values import Streams, streams_of

_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


@dataclass(frozen=True)
class Destination:
    """One stream of one worker: its file without a pipe in between, or what its pipe feeds."""

    file: LogFile | None = None
    stream: Stream | None = None


class Logs:
    """The output of a job; files are made when they are asked for, in DIR/RUN_ID/attempt_N/RANK/."""

    def __init__(self, output: Output, run_id: str, console: Console) -> None:
        self._output = output
        self._console = console
        self.directory: Path | None = None
        if output.needs_files:
            base = output.log_dir if output.log_dir is not None else tempfile.mkdtemp(prefix="paceline-logs-")
            self.directory = Path(base, run_id)

    def of_rank(self, attempt: int, rank: int) -> Path | None:
        """The directory of a worker's files."""
        return None if self.directory is None else self.directory / f"attempt_{attempt}" / str(rank)

    def destination(self, which: Streams, attempt: int, rank: int, local_rank: int) -> Destination:
        """Where stdout (`Streams.OUT`) or stderr of a worker goes."""
        output = self._output
        is_redirected = bool(which & streams_of(output.redirects, local_rank))
        is_kept = is_redirected or bool(which & streams_of(output.tee, local_rank))
        is_shown = not (is_redirected and not which & streams_of(output.tee, local_rank))
        is_shown = is_shown and (not output.shown or local_rank in output.shown)
        words = output.stdout_words if which is Streams.OUT else output.stderr_words
        file = self._open(attempt, str(rank), _NAMES[which]) if is_kept else None
        if file is not None and not is_shown and not words:
            return Destination(file)
        lines = []
        if is_shown:
            lines.append(LinePrefixer(prefix_of(rank, _is_coloured(which)), self._console.writer(which.value)))
        if words:
            matches = self._open(attempt, ".", f"filtered_{_NAMES[which]}")
            lines.append(LinePrefixer(prefix_of(rank, False), only_with(words, matches.write)))
        return Destination(stream=Stream(file, lines))

    def _open(self, attempt: int, folder: str, name: str) -> LogFile:
        assert self.directory is not None
        return LogFile(self.directory / f"attempt_{attempt}" / folder / f"{name}.log", self._console.say)


def _is_coloured(which: Streams) -> bool:
    return os.isatty(which.value) and "NO_COLOR" not in os.environ
