"""Reads benchmark results that were written by `--json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "results"

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of a result; `case` identifies it if a benchmark has several."""

    title: str
    case: str | None
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Result:
    """The measurements of one run of a benchmark.

    Attributes:
        name: The name of the file, without `.json`.
        command: The command line.
        date: The date of the run, as YYYY-MM-DD.
        machine: The processor, cores, kernel and Python version.
        versions: The versions of the relevant packages.
        origin: "measured", or "documentation" if the figures were taken from the documentation.
        note: Other information that a reader needs to interpret the figures.
        tables: The measured tables.
    """

    name: str
    command: str
    date: str
    machine: str
    versions: Mapping[str, str]
    origin: str
    note: str
    tables: tuple[Table, ...]

    def rows(self, case: str | None = None, **values: object) -> list[Row]:
        """Returns the rows with these values from the table for `case`, or from the first table if `case` is None."""
        table = next(each for each in self.tables if case is None or each.case == case)
        return [row for row in table.rows if all(row.get(name) == value for name, value in values.items())]

    def row(self, case: str | None = None, **values: object) -> Row:
        """Returns the only row with these values."""
        found = self.rows(case, **values)
        if len(found) != 1:
            raise ValueError(f"{self.name}.json has {len(found)} rows with {values}; one was expected")
        return found[0]


def read(path: Path) -> Result:
    """Reads the result in a file."""
    content = json.loads(path.read_text())
    tables = tuple(Table(each["title"], each.get("case"), tuple(each["rows"])) for each in content["tables"])
    return Result(
        name=path.stem,
        command=content["command"],
        date=content["date"],
        machine=content["machine"],
        versions=content["versions"],
        origin=content.get("origin", "measured"),
        note=content.get("note", ""),
        tables=tables,
    )


def read_all(folder: Path = FOLDER) -> dict[str, Result]:
    """Returns all results by name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
