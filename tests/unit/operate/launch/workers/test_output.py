"""Worker output: whole lines, prefixes and log files."""

from __future__ import annotations

import os
from pathlib import Path

from shown_terminal import bar, nested

from paceline.operate.launch.workers.output import LinePrefixer, LogFile, in_color


def test_lines_come_out_whole_however_they_are_cut():
    shown: list[bytes] = []
    lines = LinePrefixer(b"[rank 1] ", shown.append)
    for piece in (b"on", b"e\ntwo\r\nth", b"ree\n\xff\n", b"tail"):
        lines.feed(piece)
    lines.close()
    joined = b"".join(shown)
    assert joined == b"".join(b"[rank 1] " + x + b"\n" for x in (b"one", b"two", b"three", b"\xff", b"tail"))


def test_a_long_line_stays_whole():
    line = b"0123456789" * 100_000
    pieces = [line[at : at + 4096] for at in range(0, len(line), 4096)]
    assert lines_of(b"before\n", *pieces, b"\nafter\n") == [b"before", line, b"after"]


def test_output_without_newlines_is_divided():
    plain = b"x" * 65536
    assert max(len(line) for line in lines_of(*[plain] * 70)) == 65 * len(plain)
    drawn = b"\x1b[1m\x1b[0m" * 8192
    assert max(len(line) for line in lines_of(*[plain] * 3, *[drawn] * 3)) == 3 * len(plain)


def test_prefixes_are_colored_only_for_a_terminal():
    assert in_color("[rank 3] ", 3, False) == b"[rank 3] "
    assert in_color("[rank 3] ", 3, True).startswith(b"\x1b[")


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("paceline.operate.launch.workers.output.append_to", lambda _: os.open("/dev/full", os.O_WRONLY))
    file = LogFile(tmp_path / "stdout.log", said.append)
    file.write(b"one")
    file.write(b"two")
    file.close()
    assert said == [
        f"{tmp_path}/stdout.log: No space left on device; the rest of the output is not stored there; the job continues"
    ]


def test_the_end_of_a_file_is_what_was_added_since_it_was_opened(tmp_path: Path):
    (tmp_path / "stderr.log").write_bytes(b"crash of an earlier worker\n")
    file = LogFile(tmp_path / "stderr.log", print)
    file.write(b"step 1\n")
    file.close()
    assert (file.tail(100), file.tail(3)) == (b"step 1\n", b" 1\n")
    (tmp_path / "stderr.log").unlink()
    assert file.tail(100) == b""


def lines_of(*pieces: bytes, updates_s: float | None = None, step_s: float = 1.0) -> list[bytes]:
    """Returns the console's lines if a piece of output arrives every `step_s`."""
    got: list[bytes] = []
    now = iter(range(1000))
    lines = LinePrefixer(b"", got.append, updates_s, lambda: next(now) * step_s)
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    return b"".join(got).splitlines()


def test_a_bar_in_a_file_is_its_last_state():
    assert lines_of(*map(bar, range(101)), b"\ndone\n") == [bar(100)[1:], b"done"]


def test_a_long_bar_in_a_file_is_a_line_now_and_then():
    shown = lines_of(*map(bar, range(101)), b"\n", updates_s=25)
    assert 3 <= len(shown) <= 6
    assert shown[-1] == bar(100)[1:]
    assert len(set(shown)) == len(shown)


def test_updates_ended_by_a_carriage_return_are_a_bar_too():
    assert lines_of(b"10%\r", b"20%\r", b"30%\r\n", b"next\r\n") == [b"30%", b"next"]


def test_a_bar_that_is_wiped_out_leaves_no_line():
    assert lines_of(bar(10), bar(20), b"\r                 \r", b"text\n") == [b"text"]


def test_nested_bars_in_a_file_are_few_lines():
    pieces = [bar(0), *(nested(outer, inner) for outer in range(0, 100, 10) for inner in range(0, 100, 10))]
    shown = lines_of(*pieces, b"\n\nend\n")
    assert shown[-3:] == [bar(90)[1:], bar(90)[1:], b"end"]
    assert len(shown) <= 5
