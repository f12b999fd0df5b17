"""A check's finding, and how findings are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum


class Level(Enum):
    """How serious a finding is."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """An observation: its subject, the facts, and if it is a problem the reason and the fix.

    The attribute `line` is the line of a script that it is about.
    """

    level: Level
    about: str
    seen: str
    reason: str = ""
    fix: str = ""
    line: int | None = None


def show(findings: Sequence[Finding], as_json: bool, path: str | None = None) -> int:
    """Prints the findings; returns 1 if any is bad, otherwise 0."""
    if as_json:
        print(json.dumps([{**asdict(each), "level": each.level.value} for each in findings], indent=2))
    else:
        for each in findings:
            where = f"{path}:{each.line}: " if path is not None else ""
            print(f"{each.level.value:>4}  {where}{each.about}: {each.seen}")
            for name, text in (("why", each.reason), ("fix", each.fix)):
                if text:
                    print(f"      {name}: {text}")
    return int(any(each.level is Level.BAD for each in findings))
