"""The plain-text interface of `paceline top`, with optional ANSI colors. On a terminal, it redraws the text in place.

It is used with `--once` and `--plain`, if the output is not a terminal, and if the extra `paceline[top]` is not
installed. docs/pictures/page.py uses it to draw a figure for the documentation.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.operate.dashboard.dashboard_state import PARTS
from paceline.operate.diagnosis.finding import milliseconds

_HOME, _REST, _LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_SIZE = (100, 30)

Draw = Callable[[int, int, bool], list[str]]  # (width, height, is colored) -> lines
_COLORS = {"bad": 31, "good": 32, "waiting": 33, "quiet": 90, "bold": 1}
_COLORS_OF_HEALTH = {"good": "good", "bad": "bad", "waiting": "waiting", "over": "bold"}
_PART_COLORS = {"data": 33, "forward": 36, "backward": 34, "exposed": 31, "optimizer": 35, "other": 90}
_PART_NAMES = {"exposed": "waiting", "data": "data", "other": "other"}
_STATES = {"training": "good", "running": "good", "dead": "bad", "silent": "bad", "ended": "quiet"}
_BAR = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_MOST_LINKS = 4
_GIB, _MIB = 1 << 30, 1 << 20


def show(draw: Draw, every_s: float, is_once: bool) -> None:
    """Prints the lines from `draw` once, or every `every_s` seconds until the user presses q or Ctrl-C."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    width, height = shutil.get_terminal_size(_SIZE) if is_terminal else _SIZE
    if is_once or not is_terminal:
        is_colored = is_terminal and "NO_COLOR" not in os.environ
        while True:
            print("\n".join(draw(width, 1000, is_colored)), flush=True)
            if is_once:
                return
            time.sleep(every_s)
            print()
    with contextlib.suppress(KeyboardInterrupt), _full_screen():
        while True:
            width, height = shutil.get_terminal_size(_SIZE)
            shown = draw(width, height - 1, "NO_COLOR" not in os.environ)
            hint = f"{_LINE}\x1b[{height};1H\x1b[90mq ends this view, not the job\x1b[0m"
            sys.stdout.write(_HOME + "".join(f"{line}{_LINE}\r\n" for line in shown) + _REST + hint)
            sys.stdout.flush()
            if _is_typed("qQ\x1b", every_s):
                return


@contextlib.contextmanager
def _full_screen() -> Iterator[None]:
    before = termios.tcgetattr(0) if sys.stdin.isatty() else None
    sys.stdout.write(_ENTER)
    try:
        if before is not None:
            tty.setcbreak(0)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _is_typed(keys: str, within_s: float) -> bool:
    if not sys.stdin.isatty():
        time.sleep(within_s)
        return False
    ready = select.select([0], [], [], within_s)[0]
    return bool(ready) and any(key in keys for key in os.read(0, 64).decode(errors="replace"))


Picture = Mapping[str, Any]


def colored(text: str, color: str | int, is_colored: bool) -> str:
    """Wraps the text in ANSI color codes if `is_colored` is set."""
    code = _COLORS[color] if isinstance(color, str) else color
    return f"\x1b[{code}m{text}\x1b[0m" if is_colored and text else text


def lines_of(picture: Picture, width: int, height: int, is_colored: bool) -> list[str]:
    """Formats the job's state in at most `height` lines. If not all ranks fit, selects those that need attention."""
    header = picture["header"]
    lines = [colored(header["sentence"].capitalize(), _COLORS_OF_HEALTH[header["health"]], is_colored)]
    if header["share"] is not None:
        done = round(header["share"] * (width - 8))
        lines.append(colored("━" * done, "good", is_colored) + colored("─" * (width - 8 - done), "quiet", is_colored))
        lines[-1] += f" {header['share']:.0%}"
    if picture.get("verdict"):
        lines += ["", *(colored(line, "bad", is_colored) for line in _wrapped(picture["verdict"]["sentence"], width))]
    lines += ["", *_figures(picture, width, is_colored)]
    if picture.get("what_if"):
        lines += _wrapped(picture["what_if"]["sentence"], width)
    if picture["network"]:
        lines += [colored(line, "bad", is_colored) for line in _wrapped(sentence_of(picture["network"]), width)]
    for words in picture["owed"]:
        lines += [colored(line, "bad", is_colored) for line in _wrapped(sentence_of(words), width)]
    below = [*_curves(picture, width), *links_of(picture["links"], width, is_colored)]
    room = max(min(len(picture["ranks"]), 4), height - len(lines) - len(below) - 4)
    return [*lines, "", *_ranks(picture["ranks"], width, max(1, room), is_colored), *below][:height]


def sentence_of(words: str) -> str:
    """Returns the words as a sentence, with a capital letter and a period."""
    return f"{words[:1].upper()}{words[1:]}."


def _figures(picture: Picture, width: int, is_colored: bool) -> list[str]:
    figures = picture.get("figures")
    if not figures:
        return [colored("no step has finished yet", "quiet", is_colored)]
    words = [f"a step takes {milliseconds(figures['step'])}"]
    if figures["samples_per_s"]:
        words.append(f"{figures['samples_per_s']:,.0f} samples/s")
    words.append(f"{figures['exposed_share']:.0%} spent waiting")
    if figures["overlap"] is not None:
        words.append(f"{figures['overlap']:.0%} of the communication overlapped")
    total = sum(figures["parts"]) or 1.0
    bar, key = "", []
    for part, part_ms in zip(PARTS, figures["parts"], strict=True):
        cells = round(_BAR * part_ms / total)
        bar += colored("█" * cells, _PART_COLORS[part], is_colored)
        if part_ms / total >= 0.01:
            name = f"{_PART_NAMES.get(part, part)} {part_ms / total:.0%}"
            key.append(colored(name, _PART_COLORS[part], is_colored))
    return [*_wrapped(", ".join(words), width), f"{bar}  {'  '.join(key)}" if width >= 100 else "  ".join(key)]


def _ranks(rows: Sequence[Picture], width: int, room: int, is_colored: bool) -> list[str]:
    shown = rows if len(rows) <= room else sorted(rows, key=_attention)[: room - 1]
    columns = columns_of(shown, width)
    lines = [colored(_line([column.head for column in columns], columns, "doing", width), "quiet", is_colored)]
    for row in shown:
        text = _line([column.text(row) for column in columns], columns, row["doing"], width)
        color = "bad" if row["is_blamed"] or row["is_slow"] else _STATES.get(row["state"], "waiting")
        lines.append(text if color == "good" else colored(text, color, is_colored))
    if len(shown) < len(rows):
        lines.append(colored(f"      and {len(rows) - len(shown)} more ranks", "quiet", is_colored))
    return lines


@dataclass(frozen=True)
class RankColumn:
    """A column in the rank table: its heading, minimum width (negative to align left), and text for a given row."""

    head: str
    width: int
    text: Callable[[Picture], str]


_COLUMNS = (
    RankColumn("rank", 5, lambda row: str(row["rank"])),
    RankColumn("host", -4, lambda row: row["host"][:12]),
    RankColumn("state", -9, lambda row: row["state"]),
    RankColumn("step", 8, lambda row: _number(row["step"])),
    RankColumn("samples/s", 10, lambda row: f"{row['samples_per_s']:,.0f}" if row["samples_per_s"] else "-"),
    RankColumn("own time", 9, lambda row: _time(row["compute"])),
    RankColumn("waits", 9, lambda row: _time(row["wait"])),
    RankColumn("memory", 9, lambda row: _size(row["memory_nbytes"])),
    RankColumn("silent", 7, lambda row: f"{row['silent_s']:.1f} s"),
)
_DISPENSABLE = ("memory", "samples/s", "silent", "waits", "own time", "host")  # in the order in which they are dropped


def columns_of(rows: Sequence[Picture], width: int, gap: int = 1) -> list[RankColumn]:
    """Returns the columns to show, leaving room for the longest description of a rank's activity.

    `width` and `gap`, the space between two columns, are in characters.
    """
    columns = [replace(column, width=_width(column, rows)) for column in _COLUMNS]
    left = width - max((len(row["doing"]) + 1 + gap for row in rows if row["doing"]), default=0)
    if not any(row["samples_per_s"] for row in rows):
        columns = [column for column in columns if column.head != "samples/s"]
    for head in _DISPENSABLE:
        if sum(abs(column.width) + gap for column in columns) <= left + 1:
            break
        columns = [column for column in columns if column.head != head]
    return columns


def _width(column: RankColumn, rows: Sequence[Picture]) -> int:
    longest = max([abs(column.width), *(len(column.text(row)) for row in rows)])
    return -longest if column.width < 0 else longest


def _line(texts: Sequence[str], columns: Sequence[RankColumn], doing: str, width: int) -> str:
    cells = [
        text.ljust(-column.width) if column.width < 0 else text.rjust(column.width)
        for text, column in zip(texts, columns, strict=True)
    ]
    line = " ".join(cells) + (f"  {doing}" if doing else "")
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _attention(row: Picture) -> tuple[bool, bool, float]:
    return (not row["is_blamed"], row["state"] in ("training", "running"), -row["slowness"])


def _curves(picture: Picture, width: int) -> list[str]:
    latest: dict[str, list[float]] = {}
    for point in picture["curves"]["items"]:
        if point["mean"] is not None:
            latest.setdefault(point["name"], []).append(point["mean"])
    shown = []
    for name, values in list(latest.items())[:3]:
        shown.append(f"{name:>12}  {_spark(values, min(60, width - 30))}  {values[-1]:.4g}")
    return ["", *shown] if shown else []


def links_of(rows: Sequence[Picture], width: int, is_colored: bool) -> list[str]:
    """Returns one line each for the most important TCP links: slow links first, then the busiest ones."""
    links = [row for row in rows if row["peer"] >= 0]
    if not links:
        return []
    shown = sorted(links, key=lambda row: (not row["is_slow"], -row["nbytes_per_s"]))[:_MOST_LINKS]
    head = f"{'link':>12} {'sends':>12} {'delivers':>12} {'round trip':>11} {'sent again':>11}"
    lines = ["", colored(head[:width], "quiet", is_colored)]
    for row in shown:
        text = (
            f"{row['rank']:>4} to {row['peer']:<4} {_rate(row['nbytes_per_s']):>12} "
            f"{_rate(row['delivers_nbytes_per_s']):>12} {_time(row['round_trip']):>11} {row['retransmits']:>11,}"
        )
        lines.append(colored(text[:width], "bad", is_colored) if row["is_slow"] else text[:width])
    if len(shown) < len(links):
        lines.append(colored(f"      and {len(links) - len(shown)} more links", "quiet", is_colored))
    return lines


def _rate(nbytes_per_s: int | None) -> str:
    return f"{nbytes_per_s / 1e6:,.1f} MB/s" if nbytes_per_s else "-"


def _spark(values: Sequence[float], width: int) -> str:
    size = max(1, -(-len(values) // max(1, width)))
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(_SPARKS[round((value - low) / (high - low) * 7) if high > low else 0] for value in means)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(20, width))


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(value: float | None) -> str:
    return milliseconds(value) if value else "-"


def _size(nbytes: int) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"
