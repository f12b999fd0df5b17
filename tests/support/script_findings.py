"""Findings of `paceline doctor` in a script, and a check that it finds a planted mistake on the right line."""

from __future__ import annotations

from paceline.cli.doctor import Confidence, Diagnostic, Severity
from paceline.cli.doctor.command import check_script


def findings(text: str, confidence: Confidence = Confidence.HIGH) -> list[Diagnostic]:
    return [each for each in check_script(text) if each.confidence is confidence]


def require_found_alone(rule: str, text: str) -> None:
    """Asserts that there is exactly one finding, from this rule and on the line that ends in `# !`."""
    (line,) = (place for place, code in enumerate(text.splitlines(), 1) if code.endswith("# !"))
    found = findings(text)
    assert [(each.about, each.line) for each in found] == [(rule, line)]
    assert all(each.level is Severity.BAD and each.seen and each.reason and each.fix for each in found)
