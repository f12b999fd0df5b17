"""`paceline doctor`: finds likely problems on this machine, between two machines, or in a script.

May use: `launch`, `store` and `security`. Start reading at `command.py`; each check is a function that returns
diagnostics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a diagnostic."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "BAD"


class Confidence(Enum):
    """The confidence level of a diagnostic. Diagnostics with low confidence are shown only on request."""

    HIGH = "high"
    LOW = "low"


@dataclass(frozen=True)
class Diagnostic:
    """An observation and, if it is a problem, its consequences and the fix."""

    level: Severity
    about: str  # the subject
    seen: str  # the observation
    reason: str = ""
    fix: str = ""
    line: int | None = None  # the line of a script
    confidence: Confidence = Confidence.HIGH


def show(findings: Sequence[Diagnostic], as_json: bool, path: str | None = None) -> int:
    """Prints the findings; returns 1 if any finding is bad, otherwise 0."""
    if as_json:
        values = [{"level": finding.level.value, "confidence": finding.confidence.value} for finding in findings]
        print(json.dumps([asdict(finding) | value for finding, value in zip(findings, values, strict=True)], indent=2))
    else:
        for finding in findings:
            where = f"{path}:{finding.line}: " if path is not None else ""
            doubt = " (low confidence)" if finding.confidence is Confidence.LOW else ""
            print(f"{finding.level.value:>4}  {where}{finding.about}: {finding.seen}{doubt}")
            for name, text in (("why", finding.reason), ("fix", finding.fix)):
                if text:
                    print(f"      {name}: {text}")
    return int(any(finding.level is Severity.BAD for finding in findings))
