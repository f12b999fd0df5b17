"""Settings for the checks, from the wrapper's `checks` argument or the environment variable PACELINE_CHECKS.

This module does not import torch, because the launcher imports it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.durations import whole_number

VARIABLE = "PACELINE_CHECKS"


@dataclass(frozen=True)
class Checks:
    """The checks that are enabled."""

    are_on: bool  # whether gradients and replicas are checked
    every: int | None = None  # steps between two comparisons of the replicas; if None, the number depends on the cost

    def __str__(self) -> str:
        return str(self.every) if self.every else "on" if self.are_on else "off"


def choose_checks(checks: bool | int | None) -> Checks:
    """Returns the checks selected by `checks` or, if `checks` is None, by the environment variable PACELINE_CHECKS."""
    if checks is None:
        return parse_checks(os.environ.get(VARIABLE, "on"))
    if checks < 0:
        raise ValueError(
            f"checks is {checks}; it must be False, True, or the number of steps from one comparison of the replicas "
            "to the next"
        )
    return Checks(bool(checks), None if isinstance(checks, bool) else checks or None)


def parse_checks(text: str) -> Checks:
    """Parses a value of PACELINE_CHECKS; raises ValueError if it is malformed."""
    if text in ("on", "off"):
        return Checks(text == "on")
    if (steps := whole_number(text, least=1)) is not None:
        return Checks(True, steps)
    raise ValueError(
        f"{VARIABLE} is {text!r}; it must be on, off, or the number of steps from one comparison of the replicas to "
        "the next"
    )
