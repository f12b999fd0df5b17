"""Terminal on which one worker may draw while the lines printed by all other workers appear above the drawing.

`Rows` interprets the control sequences used by progress bars. A row is live as long as the program can return to it,
with a carriage return or by moving the cursor up. (`tqdm` moves the cursor for nested bars, and `rich` for live
displays.) Other rows are final.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable

_TOKEN = re.compile(
    rb"\x1b\[([0-?]*)[ -/]*([@-~])"  # control sequences, e.g. for colors and cursor movement
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"  # titles, links and similar sequences without width
    rb"|[\r\n]|[^\x1b\r\n]+|\x1b"
)
_PART_OF_TOKEN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,1000}\x1b?)?\Z")
_WITHOUT_WIDTH = rb"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f]"
_CONTROL = re.compile(rb"[\r\x1b]")
_WITHIN_A_ROW = b"mCDPX@"  # colors, cursor movement and edits within a row
_LONGEST_ROW = 1 << 16
_REMEMBERED = 64  # number of final rows to which the cursor can still return
_COLUMNS = 80  # default width for a terminal of unknown size


class _Row:
    def __init__(self, text: bytes = b"") -> None:
        self.text = text
        self.reported = b""  # text last returned by `final` or `changed`


class Rows:
    """The live rows of a drawing, with the cursor's position. On the terminal, each row starts with `prefix`."""

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._begin()

    def _begin(self) -> None:
        self._rows = [_Row()]
        self._before: deque[_Row] = deque(maxlen=_REMEMBERED)
        self._at = 0  # index of the cursor's row
        self._is_at_start = True  # whether the cursor is at the start of its row, where new text replaces the old
        self._is_overwritten = False  # whether the program has returned to the start of the cursor's row
        self._live = 0  # number of live rows above the last row
        self._newlines = 0  # number of newlines at the bottom since the program last moved up
        self._rest = b""  # incomplete control sequence at the end of the input
        self.hides_cursor = False
        self._may_return = False  # whether the cursor is hidden, as in live displays, and can return to all rows

    @property
    def is_blank(self) -> bool:
        """Whether all live rows are empty."""
        return not self._live and len(self._rows) == 1 and not self._rows[0].text

    @property
    def is_redrawn(self) -> bool:
        """Whether the program has returned to a live row, as progress bars do."""
        return bool(self._live) or self._is_overwritten

    @property
    def open_text(self) -> bytes:
        """The text in the cursor's row."""
        return self._rows[self._at].text

    def feed(self, data: bytes) -> bytes:
        """Accepts output, which may be split at any byte; returns the bytes to display, including prefixes."""
        data = self._rest + data
        part = _PART_OF_TOKEN.search(data)
        self._rest = data[part.start() :] if part else b""
        data = data[: part.start()] if part else data
        if self.only_grows_by(data):
            return self._feed_plain(data)
        shown = []
        for match in _TOKEN.finditer(data):
            token, final = match[0], match[2]
            if token == b"\n":
                self._newline()
            elif token == b"\r":
                self._is_at_start = self._is_overwritten = True
            elif final is not None and final not in _WITHIN_A_ROW:
                self._control(match[1], final)
            elif final is not None or token[:1] != b"\x1b" or token == b"\x1b":
                if self._is_at_start:
                    shown.append(self._prefix)
                self._write(token)
            shown.append(token)
        return b"".join(shown)

    def only_grows_by(self, data: bytes) -> bool:
        """Returns True if `data` is plain text that continues the open row. This check is fast for any length."""
        is_plain = not self._live and len(self._rows) == 1 and not (self._is_at_start and self._rows[0].text)
        return is_plain and not self._prefix and not _CONTROL.search(data)

    def final(self) -> list[bytes]:
        """Removes final rows; returns those whose text has not been returned before."""
        count = min(len(self._rows) - 1 - self._live, self._at)
        ended, self._rows = self._rows[:count], self._rows[count:]
        self._at -= count
        self._before += ended[-_REMEMBERED:]
        return _changed_lines(ended)

    def changed(self) -> list[bytes]:
        """Returns the texts of live rows that have changed since they were last returned."""
        return _changed_lines(self._rows)

    def end(self) -> list[bytes]:
        """Finalizes all rows and starts a new one; returns the rows whose text has not been returned before."""
        self._rows[self._at].text += self._rest
        ended = self._rows
        self._begin()
        return _changed_lines(ended)

    def erase(self, columns: int) -> bytes:
        """Returns the bytes that move the cursor to the first live row and clear the terminal from there."""
        above = sum(self._height(row, columns) for row in self._rows[self._first : self._at])
        if not self._is_at_start:
            above += self._height(self._rows[self._at], columns) - 1
        return b"\r" + _upwards(above) + b"\x1b[J"

    def redraw(self, columns: int) -> bytes:
        """Returns the bytes that redraw all live rows and return to the cursor's row."""
        drawn = b"\n".join(self._prefix + row.text if row.text else b"" for row in self._rows[self._first :])
        below = self._rows[self._at + 1 :]
        if below:
            back = sum(self._height(row, columns) for row in below)
            return drawn + _upwards(back) + b"\r"
        return drawn + b"\r" if self._is_at_start else drawn

    def leave(self) -> bytes:
        """Returns the bytes that move the cursor below all rows and make the cursor visible."""
        down = len(self._rows) - 1 - self._at + bool(self._rows[-1].text)
        return b"\n" * down + (b"\x1b[?25h" if self.hides_cursor else b"")

    @property
    def _first(self) -> int:
        return max(0, min(self._at, len(self._rows) - 1 - self._live))

    def _height(self, row: _Row, columns: int) -> int:
        text = re.sub(_WITHOUT_WIDTH, b"", self._prefix + row.text).decode(errors="replace")
        return max(1, -(-len(text) // columns))

    def _feed_plain(self, data: bytes) -> bytes:
        """Handles text without control characters much faster than the general case in `feed`."""
        first, *more = data.split(b"\n")
        self._rows[0].text += first
        self._rows += map(_Row, more)
        self._at = len(self._rows) - 1
        self._is_at_start = not self._rows[-1].text
        self._is_overwritten = self._is_overwritten and not more
        return data

    def _write(self, text: bytes) -> None:
        row = self._rows[self._at]
        row.text = text if self._is_at_start else row.text + text
        if len(row.text) > _LONGEST_ROW and self._prefix:
            row.text = row.text[-_LONGEST_ROW:]
        self._is_at_start = False

    def _newline(self) -> None:
        self._is_at_start = True
        self._at += 1
        if self._at < len(self._rows):
            return
        self._rows.append(_Row())
        self._is_overwritten = False
        self._newlines += 1
        if self._may_return:
            self._live += 1
        elif self._newlines > self._live:
            self._live = 0

    def _control(self, parameter: bytes, final: bytes) -> None:
        count = int(parameter) if parameter.isdigit() else 0
        if final == b"A":
            self._up(max(1, count))
        elif final == b"B":
            self._at = min(self._at + max(1, count), len(self._rows) - 1)
        elif final == b"G" and count <= 1:
            self._is_at_start = True
        elif final == b"K" and (count == 2 or self._is_at_start):
            self._rows[self._at].text = b""
        elif final == b"J":
            del self._rows[self._at + 1 :]
            if self._is_at_start:
                self._rows[self._at].text = b""
        elif parameter == b"?25":
            self.hides_cursor = self._may_return = final == b"l"

    def _up(self, count: int) -> None:
        for _ in range(min(count, _REMEMBERED) - self._at):
            self._rows.insert(0, self._before.pop() if self._before else _Row())
            self._at += 1
        self._at = max(0, self._at - count)
        self._live = max(self._live, len(self._rows) - 1 - self._at)
        self._newlines = 0
        self._may_return = False


def _upwards(rows: int) -> bytes:
    return b"\x1b[%dA" % rows if rows else b""


def _changed_lines(rows: list[_Row]) -> list[bytes]:
    texts = []
    for row in rows:
        if row.text != row.reported:
            row.reported = row.text
            texts.append(row.text)
    return texts


class Screen:
    """A terminal. `write` writes to the terminal, and `fd` is used to query its size."""

    def __init__(self, write: Callable[[bytes], None], fd: int) -> None:
        self._write = write
        self._fd = fd
        self._owner: object = None
        self._rows = Rows()

    def size(self) -> tuple[int, int]:
        """Returns the number of columns and the number of rows; zeros if unknown."""
        try:
            return os.get_terminal_size(self._fd)
        except OSError:
            return 0, 0

    def claim(self, stream: object, prefix: bytes) -> bool:
        """Returns True if `stream` may draw (with `prefix` in each row), because it drew last or nothing is drawn."""
        if self._owner is not stream and self._rows.is_blank:
            self._owner, self._rows = stream, Rows(prefix)
        return self._owner is stream

    def draw(self, data: bytes) -> None:
        """Displays output from the stream that may draw. Output may be split at any byte."""
        self._write(self._rows.feed(data))
        self._rows.final()

    def above(self, lines: bytes) -> None:
        """Displays whole lines above the drawing."""
        if self._rows.is_blank:
            self._write(lines)
        else:
            columns = self.size()[0] or _COLUMNS
            self._write(self._rows.erase(columns) + lines + self._rows.redraw(columns))

    def redraw(self) -> None:
        """Repaints the drawing, starting at the cursor's row."""
        self._write(b"\r" + self._rows.redraw(self.size()[0] or _COLUMNS))

    def leave(self, stream: object) -> None:
        """Ends the drawing by `stream`."""
        if self._owner is stream:
            self._write(self._rows.leave())
            self._rows.end()
            self._owner = None
