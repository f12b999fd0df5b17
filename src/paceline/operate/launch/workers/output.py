"""Worker output: forwarded to the console in whole lines with rank prefixes, and to files unchanged.

`Logs` selects the destinations of each worker's streams. `WorkerOutput` creates the file, pipe or pseudo-terminal that
the worker writes to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import tempfile
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from paceline.comm.security.own_files import append_to
from paceline.operate.launch.job import OutputOptions
from paceline.operate.launch.option_types import Streams, streams_of
from paceline.operate.launch.workers.terminal import Rows, Screen

_COLORS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE = 1 << 22  # longer lines are split, which limits the memory for output without newlines
_LONGEST_DRAWN_LINE = 1 << 16  # the same for lines with control characters; each of these characters copies the line
_PATIENCE_S = 0.2
_LINES_IN_VIEW = 40  # approximate height of a terminal
_LINES_COMPARED = 6

Write = Callable[[bytes], None]
_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
_UPDATES_S = 10.0  # interval between printed states of a progress bar on a console that cannot redraw lines
# Disables pagers, which would wait forever for keys on a worker's terminal.
WITHOUT_PAGERS = {"PAGER": "cat", "GIT_PAGER": "cat"}
_PREFIX_COLUMNS = len("[rank 0] ")  # "[slot 0] " has the same length


def wants_colors(fd: int) -> bool:
    """Returns True if output to `fd` may contain colors."""
    return os.isatty(fd) and "NO_COLOR" not in os.environ


def in_color(text: str, number: int, colored: bool) -> bytes:
    """Returns a line prefix, in the color for this number if `colored`."""
    return f"\x1b[{_COLORS[number % len(_COLORS)]}m{text}\x1b[0m".encode() if colored else text.encode()


class LinePrefixer:
    """Forwards whole lines to `write`, and an unfinished last line on `close`.

    If a line is redrawn, as by a progress bar, only the last state of the line is forwarded. Unless `updates_s` is
    None, an intermediate state is also forwarded every `updates_s` seconds.
    """

    def __init__(
        self,
        prefix: bytes,
        write: Write,
        updates_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = prefix
        self._write = write
        self._updates_s = updates_s
        self._clock = clock
        self._rows = Rows()
        self._updated_s: float | None = None

    def feed(self, data: bytes) -> None:
        """Accepts output, which may be split at any byte."""
        longest = _LONGEST_LINE if self._rows.only_grows_by(data) else _LONGEST_DRAWN_LINE
        lines = self._too_long(longest)
        self._rows.feed(data)
        self._pass_on([*lines, *self._rows.final(), *self._too_long(longest)])
        if self._updates_s is not None:
            self._update(self._updates_s)

    def _too_long(self, longest: int) -> list[bytes]:
        return self._rows.end() if len(self._rows.open_text) > longest else []

    def _update(self, every_s: float) -> None:
        if not self._rows.is_redrawn:
            self._updated_s = None
        elif self._updated_s is None:
            self._updated_s = self._clock()
        elif self._clock() - self._updated_s >= every_s:
            self._pass_on(self._rows.changed())
            self._updated_s = self._clock()

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        shown = b"".join(self._prefix + line + b"\n" for line in lines if line.strip())
        if shown:
            self._write(shown)

    def take(self) -> bytes:
        """Removes and returns the unfinished line."""
        return b"\n".join(self._rows.end())

    def prompt(self) -> None:
        """Shows the unfinished line. The next output starts with the prefix again."""
        if not self._rows.is_redrawn and (text := self.take()):
            self._write(self._prefix + text)

    def close(self) -> None:
        """Writes the remaining output; idempotent."""
        self._pass_on(self._rows.end())


class LogFile:
    """An output file to append to. Its directory is created if necessary.

    A full disk does not terminate the job: the error is reported once, and later output is dropped.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, print_line: Callable[[str], None]) -> None:
        self._path = path
        self._print_line = print_line
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(append_to(str(path)), "ab", buffering=0)
            self._begin = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise OSError(
                f"{path.parent} cannot hold the workers' output ({error.strerror}); set --log-dir to a writable "
                "directory"
            ) from error

    def fileno(self) -> int:
        """Returns the descriptor, for workers that write to the file directly."""
        return self._file.fileno()

    def write(self, data: bytes) -> None:
        """Writes `data` unless an earlier write has failed."""
        try:
            while data and not self._file.closed:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            self._print_line(
                f"{self._path}: {error.strerror}; the rest of the output is not stored there; the job continues"
            )

    def tail(self, nbytes: int) -> bytes:
        """Returns the end, at most `nbytes` bytes, of what was added since the file was opened, even after `close`."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(max(self._begin, os.fstat(file.fileno()).st_size - nbytes))
            return file.read(nbytes)
        return b""

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()


class TerminalSink(LinePrefixer):
    """Forwards a stream that may draw on the terminal, unless the worker's other stream is drawing."""

    def __init__(self, screen: Screen, prefix: bytes) -> None:
        super().__init__(prefix, screen.above)
        self._screen = screen

    def feed(self, data: bytes) -> None:
        """Accepts output, which may be split at any byte."""
        if self._screen.claim(self, self._prefix):
            self._screen.draw(self.take() + data)
        else:
            super().feed(data)

    def prompt(self) -> None:
        """Does nothing, because the line is already visible."""

    def close(self) -> None:
        """Moves the terminal's cursor to the beginning of a row."""
        super().close()
        self._screen.leave(self)


class OutputStream:
    """One output stream of a worker, written to a file, to the console, and to a filtered file."""

    def __init__(self, file: LogFile | None, sinks: Sequence[LinePrefixer]) -> None:
        self._file = file
        self._sinks = sinks

    def feed(self, data: bytes) -> None:
        """Accepts output, which may be split at any byte."""
        if self._file is not None:
            self._file.write(data)
        for sink in self._sinks:
            sink.feed(data)

    def prompt(self) -> None:
        """Shows the unfinished line, which is a prompt."""
        for sink in self._sinks:
            sink.prompt()

    def close(self) -> None:
        """Writes the remaining output; idempotent."""
        for sink in self._sinks:
            sink.close()
        if self._file is not None:
            self._file.close()


def only_with(words: Sequence[str], write: Write) -> Write:
    """Returns a function that forwards only lines with one of `words`."""
    encoded = [word.encode() for word in words]

    def filtered(lines: bytes) -> None:
        kept = [line for line in lines.splitlines(keepends=True) if any(word in line for word in encoded)]
        if kept:
            write(b"".join(kept))

    return filtered


class Console:
    """The launcher's own stdout and stderr. Once `hurries` returns True, output that is not read is discarded."""

    def __init__(self, hurries: Callable[[], bool] = lambda: False) -> None:
        self._hurries = hurries
        self._unread: set[int] = set()
        self._latest: deque[bytes] = deque(maxlen=_LINES_IN_VIEW)
        can_redraw = os.environ.get("TERM", "dumb") != "dumb"
        self._screens = {fd: Screen(self._writer(fd), fd) for fd in (1, 2) if os.isatty(fd) and can_redraw}
        if len(self._screens) == 2 and os.fstat(1).st_rdev == os.fstat(2).st_rdev:
            self._screens[2] = self._screens[1]

    def screen(self, fd: int) -> Screen | None:
        """Returns the terminal to which `fd` refers, or None. The result may be the same for stdout and stderr."""
        return self._screens.get(fd)

    def writer(self, fd: int) -> Write:
        """Returns a function that writes whole lines to `fd`, above any drawing by a worker."""
        return self._screens[fd].above if fd in self._screens else self._writer(fd)

    def _writer(self, fd: int) -> Write:
        """Returns a function that writes to `fd` and silently discards the data once the reader has closed its end."""

        def write(data: bytes) -> None:
            self._latest.extend(data.rstrip().rsplit(b"\n", _LINES_IN_VIEW)[-_LINES_IN_VIEW:])
            while data and fd not in self._unread:
                if not select.select([], [fd], [], _PATIENCE_S)[1]:
                    if self._hurries():
                        self._unread.add(fd)
                    continue
                try:
                    data = data[os.write(fd, data[: select.PIPE_BUF]) :]
                except BlockingIOError:
                    continue
                except OSError:  # the reader or the terminal is closed
                    self._unread.add(fd)

        return write

    def redraw(self) -> None:
        """Repaints the workers' drawings, starting at the cursor's row."""
        for screen in set(self._screens.values()):
            screen.redraw()

    def is_in_view(self, text: str, name: str) -> bool:
        """Returns True if the last lines on the console include the end of `text`, printed by worker `name`."""
        latest = iter([shown for shown in self._latest if f"[{name}] ".encode() in shown])
        end = [line.strip().encode(errors="backslashreplace") for line in text.splitlines() if line.strip()]
        return all(any(line in shown for shown in latest) for line in end[-_LINES_COMPARED:])

    def print_line(self, text: str) -> None:
        """Writes a line from the launcher itself to stderr."""
        self.writer(2)(f"paceline: {text}\n".encode(errors="backslashreplace"))


def open_standard_streams() -> None:
    """Opens /dev/null for any closed descriptor from 0 to 2, so that no later pipe gets one of these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class Logs:
    """The output of a job. Files are created on demand in DIRECTORY/attempt_N/RANK/.

    `listener` creates an additional sink for a rank's stream (1 or 2). This sink receives output that is only written
    to a file if `receives_all` is set.
    """

    def __init__(
        self,
        output: OutputOptions,
        directory: Path | None,
        console: Console,
        word: str = "rank",
        listener: Callable[[int, int], LinePrefixer] | None = None,
        receives_all: bool = True,
    ) -> None:
        self._output = output
        self._console = console
        self._word = word
        self._listener = listener
        self._receives_all = receives_all and listener is not None
        if output.needs_files and directory is None:
            directory = Path(tempfile.mkdtemp(prefix="paceline-logs-"))
        self.directory = directory if output.needs_files else None

    def of_rank(self, attempt: int, rank: int) -> Path | None:
        """Returns the directory for a worker's files, or None if files are not kept."""
        return None if self.directory is None else self.directory / f"attempt_{attempt}" / str(rank)

    def outputs(self, attempt: int, rank: int, local_rank: int, draws: bool) -> list[WorkerOutput]:
        """Creates a worker's stdout and stderr; `draws` permits drawing.

        Both share one pseudo-terminal if the same terminal is their only destination.
        """
        out = self._destination(Streams.OUT, attempt, rank, local_rank, draws)
        err = self._destination(Streams.ERR, attempt, rank, local_rank, draws)
        shared = out[2] is not None and out[2] is err[2]
        return [WorkerOutput(*out)] if shared else [WorkerOutput(*out), WorkerOutput(*err)]

    def _destination(
        self, which: Streams, attempt: int, rank: int, local_rank: int, draws: bool
    ) -> tuple[LogFile | None, OutputStream | None, Screen | None]:
        """Returns the arguments of a stream's `WorkerOutput`."""
        output = self._output
        is_redirected = bool(which & streams_of(output.redirects, local_rank))
        is_copied = bool(which & streams_of(output.tee, local_rank))
        is_shown = (is_copied or not is_redirected) and (not output.shown or local_rank in output.shown)
        words = output.stdout_words if which is Streams.OUT else output.stderr_words
        file = self._open(attempt, str(rank), _NAMES[which]) if is_redirected or is_copied else None
        if file is not None and not is_shown and not words and not self._receives_all:
            return file, None, None
        sinks = [] if self._listener is None else [self._listener(rank, which.value)]
        screen = self._console.screen(which.value)
        if is_shown:
            sinks.append(self._shown(which, rank, local_rank, screen, draws))
        if words:
            matches = self._open(attempt, ".", f"filtered_{_NAMES[which]}")
            sinks.append(LinePrefixer(f"[{self._word} {rank}] ".encode(), only_with(words, matches.write)))
        is_all_drawn = draws and is_shown and file is None and not words
        return None, OutputStream(file, sinks), screen if is_all_drawn else None

    def _shown(self, which: Streams, rank: int, local_rank: int, screen: Screen | None, draws: bool) -> LinePrefixer:
        template = self._output.line_prefix or f"[{self._word} ${{rank}}] "
        text = Template(template).safe_substitute(rank=rank, local_rank=local_rank)
        prefix = in_color(text, rank, wants_colors(which.value))
        if screen is None:
            return LinePrefixer(prefix, self._console.writer(which.value), _UPDATES_S)
        return TerminalSink(screen, prefix) if draws else LinePrefixer(prefix, screen.above)

    def _open(self, attempt: int, folder: str, name: str) -> LogFile:
        assert self.directory is not None
        return LogFile(self.directory / f"attempt_{attempt}" / folder / f"{name}.log", self._console.print_line)


class WorkerOutput:
    """The target that a worker writes to: a file, or a pipe or pseudo-terminal whose data is forwarded to `stream`.

    The worker gets a pseudo-terminal if `screen`, the launcher's terminal, is the only destination.
    """

    def __init__(self, file: LogFile | None, stream: OutputStream | None, screen: Screen | None) -> None:
        self.file = file
        self.stream = stream
        self._screen = screen
        self.reading = -1
        if self.file is not None:
            self.writing = self.file.fileno()
            return
        try:
            self.reading, self.writing = os.pipe() if self._screen is None else _open_terminal()
        except OSError:
            if self._screen is None:
                raise
            self._screen = None  # no pseudo-terminal is available
            self.reading, self.writing = os.pipe()
        self.resize()

    @property
    def is_terminal(self) -> bool:
        """Whether the worker writes to a pseudo-terminal."""
        return self._screen is not None

    def resize(self) -> None:
        """Sets the worker's terminal size to the real size minus the width of the prefix."""
        if self._screen is not None:
            columns, rows = self._screen.size()
            size = struct.pack("HHHH", rows, max(0, columns - _PREFIX_COLUMNS), 0, 0)
            fcntl.ioctl(self.reading, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Closes the target if no worker was started with it."""
        self.close_ours()
        if self.reading >= 0:
            os.close(self.reading)

    def close_ours(self) -> None:
        """Closes this process's copy of the write end."""
        if self.file is not None:
            self.file.close()
        else:
            os.close(self.writing)


def _open_terminal() -> tuple[int, int]:
    """Opens a pseudo-terminal; returns the read end and the worker's end, which is write-only."""
    ours, theirs = os.openpty()
    try:
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST  # disables newline conversion
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        writing = os.open(f"/proc/self/fd/{theirs}", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, termios.error) as error:
        os.close(ours)
        raise OSError(f"no pseudo-terminal: {error}") from error
    finally:
        os.close(theirs)
    return ours, writing
