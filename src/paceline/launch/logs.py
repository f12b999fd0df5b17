"""Decides where the streams of each worker go: the console, files by attempt and rank, or both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template

from paceline.launch.job import Output
from paceline.launch.output import (
    Console,
    Drawing,
    LinePrefixer,
    LogFile,
    Sink,
    Stream,
    in_colour,
    only_with,
    prefix_of,
    wants_colours,
)
from paceline.launch.screen import Screen
from paceline.launch.values import Streams, streams_of

_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


_UPDATES_S = 10.0  # between two states of a progress bar on a console that cannot redraw lines


@dataclass(frozen=True)
class Destination:
    """The target of one stream of one worker: a file that it writes itself, or the stream that its pipe feeds.

    `screen` is the terminal if the stream goes nowhere else, so that the worker may write to a terminal too.
    """

    file: LogFile | None = None
    stream: Stream | None = None
    screen: Screen | None = None


class Logs:
    """The output of a job. Files are made when a worker needs them, in DIRECTORY/attempt_N/RANK/.

    `directory` is the job's, None if it has none; `word` says what the numbers in front of the lines are. `listener`
    makes one more sink for a stream of a rank; if `hears_all`, also for what only a file would get.
    """

    def __init__(
        self,
        output: Output,
        directory: Path | None,
        console: Console,
        word: str = "rank",
        listener: Callable[[int, int], Sink] | None = None,
        hears_all: bool = True,
    ) -> None:
        self._output = output
        self._console = console
        self._word = word
        self._listener = listener
        self._hears_all = hears_all and listener is not None
        self.directory: Path | None = None
        if output.needs_files:
            self.directory = directory or Path(tempfile.mkdtemp(prefix="paceline-logs-"))

    def of_rank(self, attempt: int, rank: int) -> Path | None:
        """Returns the directory of a worker's files; None if none are kept."""
        return None if self.directory is None else self.directory / f"attempt_{attempt}" / str(rank)

    def destination(self, which: Streams, attempt: int, rank: int, local_rank: int, draws: bool = False) -> Destination:
        """Returns where stdout (`Streams.OUT`) or stderr of a worker goes; `draws` is set for the one that may draw."""
        output = self._output
        is_redirected = bool(which & streams_of(output.redirects, local_rank))
        is_kept = is_redirected or bool(which & streams_of(output.tee, local_rank))
        is_shown = not (is_redirected and not which & streams_of(output.tee, local_rank))
        is_shown = is_shown and (not output.shown or local_rank in output.shown)
        words = output.stdout_words if which is Streams.OUT else output.stderr_words
        file = self._open(attempt, str(rank), _NAMES[which]) if is_kept else None
        if file is not None and not is_shown and not words and not self._hears_all:
            return Destination(file)
        sinks: list[Sink] = [] if self._listener is None else [self._listener(rank, which.value)]
        screen = self._console.screen(which.value)
        if is_shown:
            sinks.append(self._shown(which, self._prefix(which, rank, local_rank), screen, draws))
        if words:
            matches = self._open(attempt, ".", f"filtered_{_NAMES[which]}")
            sinks.append(LinePrefixer(prefix_of(rank, False, self._word), only_with(words, matches.write)))
        is_all_drawn = draws and is_shown and file is None and not words
        return Destination(stream=Stream(file, sinks), screen=screen if is_all_drawn else None)

    def _prefix(self, which: Streams, rank: int, local_rank: int) -> bytes:
        """Returns what stands before a worker's lines on the console."""
        coloured = wants_colours(which.value)
        if not self._output.line_prefix:
            return prefix_of(rank, coloured, self._word)
        text = Template(self._output.line_prefix).safe_substitute(rank=rank, local_rank=local_rank)
        return in_colour(text, rank, coloured)

    def _shown(self, which: Streams, prefix: bytes, screen: Screen | None, draws: bool) -> Sink:
        if screen is None:
            return LinePrefixer(prefix, self._console.writer(which.value), _UPDATES_S)
        return Drawing(screen, prefix) if draws else LinePrefixer(prefix, screen.above)

    def _open(self, attempt: int, folder: str, name: str) -> LogFile:
        assert self.directory is not None
        return LogFile(self.directory / f"attempt_{attempt}" / folder / f"{name}.log", self._console.say)
