"""An explanation that fails does not end the job that it should explain."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Otherwise = TypeVar("Otherwise")


def carefully(explain: Callable[[], T], otherwise: Otherwise) -> T | Otherwise:
    """Returns what `explain` returns; if it raises, tells so on stderr, with the line, and returns `otherwise`."""
    try:
        return explain()
    except Exception as error:  # whatever it is, training matters more
        place = traceback.extract_tb(error.__traceback__)[-1]
        sys.stderr.write(
            f"paceline: what was recorded could not be explained ({type(error).__name__}: {error}, in {place.filename}:"
            f"{place.lineno}); this is an error of Paceline's, and the job goes on without the explanation\n"
        )
        return otherwise
