"""How long a program waits for its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from paceline import _core
from paceline.record.names import EventKind
from paceline.record.spans import begin_event

_Batch = TypeVar("_Batch")

_DATA_WAIT = int(EventKind.DATA_WAIT)


def recorded_waits(batches: Iterator[_Batch], name: str) -> Iterator[_Batch]:
    """Yields what `batches` yields, and records how long each one takes to come.

    Args:
        batches: what is waited for.
        name: the loader's name.
    """
    count = 0
    while True:
        stamp = begin_event(_DATA_WAIT, name, count)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            _core.record_end(stamp)
        yield batch
        count += 1
