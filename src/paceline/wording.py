"""Phrases that the messages of several layers share. Imports nothing of Paceline's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_MOST_SHOWN = 100  # characters


def and_more(names: Sequence[object], most: int) -> str:
    """Lists the first `most` of `names`, and says how many more there are.

    >>> and_more([0, 1, 2], most=2)
    '0, 1 and 1 more'
    >>> and_more([0, 1, 2], most=3)
    '0, 1, 2'
    """
    named = ", ".join(map(str, names[:most]))
    return f"{named} and {len(names) - most} more" if len(names) > most else named


def shown(value: object) -> str:
    """Returns a value as a message shows it: itself if it is short, otherwise its type.

    A tensor's `repr` reads all of its values, and ends the process if its memory has been freed.

    >>> shown("soon"), shown(None), shown([1])
    ("'soon'", 'None', 'a list')
    """
    is_short = value is None or isinstance(value, (str, bytes, int, float, Enum))
    return repr(value)[:_MOST_SHOWN] if is_short else f"a {type(value).__name__}"
