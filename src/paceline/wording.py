"""Phrases that the messages of several layers share. Imports nothing of Paceline's."""

from __future__ import annotations

from collections.abc import Sequence


def and_more(names: Sequence[object], most: int) -> str:
    """Lists the first `most` of `names`, and says how many more there are.

    >>> and_more([0, 1, 2], most=2)
    '0, 1 and 1 more'
    >>> and_more([0, 1, 2], most=3)
    '0, 1, 2'
    """
    named = ", ".join(map(str, names[:most]))
    return f"{named} and {len(names) - most} more" if len(names) > most else named
