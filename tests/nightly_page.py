"""Updates the table of results in docs/nightly.md. Each part's row is from the latest run that included the part."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

HEADING = "## The newest results\n"
_COLUMNS = ("part", "day", "result", "time", "load", "machine", "")


@dataclass(frozen=True)
class Result:
    """The result of a part.

    Attributes:
        part: The name of the part.
        verdict: "passed", "failed" or "skipped".
        took_s: The duration in seconds.
        detail: The summary of the tests, or the reason why the part failed or was skipped.
        load: The load average over one minute before the part.
    """

    part: str
    verdict: str
    took_s: float
    detail: str = ""
    load: float = 0.0


def table(rows: Sequence[str]) -> str:
    """Returns the rows as a Markdown table."""
    return "\n".join([_line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *rows])


def row(result: Result, day: str) -> str:
    """Returns the row for a result on this machine."""
    ran = result.verdict != "skipped"
    took = f"{result.took_s / 60:.1f} min" if result.took_s >= 60 else f"{result.took_s:.0f} s"
    detail = result.detail.replace("|", r"\|")
    return _line(
        [
            result.part,
            day,
            result.verdict,
            took if ran else "",
            f"{result.load:.0f}" if ran else "",
            machine() if ran else "",
            detail,
        ]
    )


def machine() -> str:
    """Returns a description of this machine."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, "
        f"Python {platform.python_version()}"
    )


def with_results(page: str, results: Sequence[Result], day: str, order: Sequence[str]) -> str:
    """Returns the text of docs/nightly.md with these results.

    A skipped part does not replace an earlier result; parts that are not in `order` lose their rows.

    Raises:
        ValueError: The page has no section for results.
    """
    head, found, section = page.partition(HEADING)
    if not found:
        raise ValueError(f"docs/nightly.md has no line {HEADING.strip()!r}, below which results are recorded")
    rows = {name: line for line in section.splitlines() if (name := _part_of(line)) in order}
    for result in results:
        if result.verdict != "skipped" or result.part not in rows:
            rows[result.part] = row(result, day)
    return f"{head}{HEADING}\n{table([rows[name] for name in order if name in rows])}\n"


def _line(cells: Sequence[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _part_of(line: str) -> str:
    return line.split("|")[1].strip() if line.startswith("|") else ""
