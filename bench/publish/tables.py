"""Formats figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from publish.results import Result, Row

Cell = str | Callable[[Row], object]


def number(value: object) -> str:
    """Returns a figure with three significant digits, or "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def duration(ms: float) -> str:
    """Returns a time in ms with two or three digits, or in seconds if it is at least 1,000 ms."""
    return f"{number(ms)} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table with those columns that have a value in at least one row."""
    all_rows = [list(row) for row in rows]
    shown = [at for at, _ in enumerate(heads) if any(row[at] is not None for row in all_rows)]
    body = [[number(row[at]) for at in shown] for row in all_rows]
    lines = [[heads[at] for at in shown], ["---"] * len(shown), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("|  |", "| |")


def table(rows: Iterable[Row], columns: Mapping[str, Cell]) -> str:
    """Returns a table with a line for each row.

    Args:
        rows: The rows to show.
        columns: For each header, the name of a value or a function that formats a cell from a row.
    """
    return markdown(list(columns), [[_cell(row, cell) for cell in columns.values()] for row in rows])


def pivot(
    rows: Sequence[Row],
    lines: Mapping[str, Cell],
    columns: Mapping[str, Callable[[Mapping[str, Row]], object]],
    by: str = "by",
) -> str:
    """Returns a table in which each line combines all contestants.

    Args:
        rows: A row for each contestant.
        lines: The columns that distinguish the lines, as for `table`.
        columns: For each further header, a function that formats a cell from the contestants' rows, by name.
        by: The column that contains the contestant's name.
    """
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(number(_cell(row, cell)) for cell in lines.values())
        groups.setdefault(key, {})[str(row[by])] = row
    made = [[*key, *(cell(contestants) for cell in columns.values())] for key, contestants in groups.items()]
    return markdown([*lines, *columns], made)


def renamed(column: str, names: Mapping[str, str]) -> Callable[[Row], str]:
    """Returns a function that formats a cell: the value's name in `names`, or the value itself if it has no name."""
    return lambda row: names.get(row[column], row[column])


def spread(name: str, unit: str = "µs") -> Callable[[Mapping[str, Row]], object]:
    """Returns a function that formats a contestant's median, with the 95th percentile in parentheses if it is known."""
    return lambda contestants: spread_of(contestants[name], unit) if name in contestants else None


def spread_of(row: Row, unit: str = "µs") -> str | None:
    """Returns the median of a row, with the 95th percentile in parentheses if it is known, or None without a median."""
    return with_tail(row.get(f"p50 {unit}"), row.get(f"p95 {unit}"))


def with_tail(p50: float | None, p95: float | None) -> str | None:
    """Returns a median, with the 95th percentile in parentheses if it is known, or None without a median."""
    return None if p50 is None else number(p50) + ("" if p95 is None else f" ({number(p95)})")


def ratio(name: str, to: str, unit: str = "µs") -> Callable[[Mapping[str, Row]], object]:
    """Returns a function that formats the median of one contestant divided by that of another."""

    def cell(contestants: Mapping[str, Row]) -> object:
        both = [contestants[each] for each in (name, to) if each in contestants]
        # Stored ratios relative to a third library are preferred, because stored times are rounded to fewer digits.
        column = "ratio" if all(row.get("ratio") for row in both) else f"p50 {unit}"
        values = [row.get(column) for row in both]
        return values[0] / values[1] if len(values) == 2 and None not in values else None

    return cell


def source(*results: Result) -> str:
    """Returns the origin of results: the commands, the machine, the date, the meaning of n, the notes and the files."""
    runs: dict[str, list[Result]] = {}
    for each in results:
        torch = f", torch {each.versions['torch']}" if "torch" in each.versions else ""
        runs.setdefault(f"{each.date}, {each.machine}{torch}", []).append(each)
    sentences = [", ".join(f"`{each.command}`" for each in run) + f": {where}." for where, run in runs.items()]
    counts = [int(row["n"]) for each in results for part in each.tables for row in part.rows if row.get("n")]
    if counts:
        least, most = min(counts), max(counts)
        sentences.append(f"n = {least:,}." if least == most else f"n = {least:,} to {most:,}.")
    sentences += dict.fromkeys(each.note for each in results if each.note)
    files = ", ".join(f"[{each.name}.json](../bench/results/{each.name}.json)" for each in results)
    return " ".join([*sentences, f"({files})"])


def _cell(row: Row, cell: Cell) -> object:
    return row.get(cell) if isinstance(cell, str) else cell(row)
