"""Reads the latest part of a recording quickly, for a launcher that has many to look at.

A whole recording has 20,000 entries, and to take one apart takes Python some microseconds. The entries that are not
wanted are crossed out in the copy first, by their stamps.
"""

from __future__ import annotations

from paceline.observe.reading import parse, stamps_in
from paceline.observe.recording import Recording
from paceline.observe.witnesses import MOST_CALLS
from paceline.record import layout

MOST_EVENTS = 1024
_CALLS, _EVENTS = 3, 4  # the tables' numbers in the header


def glimpse(fd: int, most_calls: int = MOST_CALLS, most_events: int = MOST_EVENTS) -> Recording:
    """Returns the latest calls and events of a recording, and those that are open, through its memory's descriptor.

    The calls come without the names of their algorithms.

    Raises:
        NoRecordingError: the process has not begun to record.
        OSError: the descriptor cannot be read.
    """
    data = _snapshot(fd)
    if data:
        _cross_out(data, _CALLS, layout.CALL.size, most_calls)
        _cross_out(data, _EVENTS, layout.EVENT.size, most_events)
    return parse(data, f"descriptor {fd}", has_algorithms=False)


def has_open_calls(fd: int) -> bool:
    """Returns whether the process is in a call; this is cheap."""
    try:
        data = _snapshot(fd)
    except OSError:
        return False
    return bool(data) and any(
        stamp & 3 == layout.OPEN for stamp in stamps_in(data, *_place(data, _CALLS), layout.CALL.size)
    )


def _snapshot(fd: int) -> bytearray:
    """Returns a copy of the memory; an empty one if it holds no recording."""
    from paceline import _core

    data = bytearray(_core.snapshot_recording(fd))
    is_one = len(data) >= layout.HEADER.size and data.startswith(layout.MAGIC.to_bytes(layout.WORD_NBYTES, "little"))
    return data if is_one else bytearray()


def _place(data: bytearray, table: int) -> tuple[int, int]:
    """Returns where a table is and how many entries it has."""
    places = layout.HEADER.unpack_from(data)[4:14]
    return places[2 * table], places[2 * table + 1]


def _cross_out(data: bytearray, table: int, nbytes: int, most: int) -> None:
    offset, capacity = _place(data, table)
    stamps = stamps_in(data, offset, capacity, nbytes)
    oldest = layout.first_stamp(layout.index_of(max(stamps, default=0)) - most + 1)  # of those that stay
    for at, stamp in enumerate(stamps):
        if stamp and stamp < oldest and layout.state_of(stamp) != layout.OPEN:
            data[offset + at * nbytes : offset + at * nbytes + layout.WORD_NBYTES] = bytes(layout.WORD_NBYTES)
