"""The layout of a recording, as native/record/layout.hpp defines it; a test compares the two.

A recording is one block of memory, little-endian: a header, the pairs of times that calibrate its clock, a table of
names, a table of groups, a ring of calls, a ring of events and a table of links. Every entry but a name begins with a
*stamp*: the entry's index, a version that each change increments, and whether the entry is complete, open (it will
change again) or being written. A copy whose stamp was the same before and after it was made is whole.
"""

from __future__ import annotations

import struct

MAGIC = int.from_bytes(b"PLRECORD", "little")
VERSION = 1

NBYTES = 1671168

HEADER = struct.Struct("<QIIQ10IIiiIIIQQQQ")
"""magic, version, header's bytes, bytes; offset and capacity of pairs, names, groups, calls, events; pid, rank, world
size, clock kind, flags, places of links that were ever used, ticks a second (0: unknown), time namespace, pair count,
name count."""

LINKS_PLACE = struct.Struct("<II")  # offset and capacity of the links
LINKS_PLACE_AT = 120
CALLS_BEGUN_AT = 128
EVENTS_BEGUN_AT = 192
PROGRESS = struct.Struct("<QQ")  # the tick of the latest record, the current step
PROGRESS_AT = 256
WORKER_AT, WORKER_NBYTES = 512, 128
HOST_AT, HOST_NBYTES = 640, 128
BOOT_AT, BOOT_NBYTES = 768, 64

PAIR = struct.Struct("<QQqq")  # stamp, tick, CLOCK_MONOTONIC in ns, CLOCK_REALTIME in ns
NAME_NBYTES = 64
GROUP = struct.Struct("<QIIiIQIIQQQ")
"""stamp, serial, size, own rank, name, identity, members listed, engine's name, ticks of opening and closing, spare"""
GROUP_NBYTES = 512
CALL = struct.Struct("<QIBBBBQQiBBBBQQQQQiIIIqQQq")
"""stamp; group, operation, dtype, reduction, algorithm; sequence; count; root, state, outcome, is asynchronous, spare;
ticks of arrival, start and end; bytes through shared memory, over TCP; last to arrive, first missing rank; step,
thread; tag; tick at which all had come; missing ranks as bits, from the first of them on; predicted nanoseconds (0:
nobody has predicted it)"""
EVENT = struct.Struct("<QIIQQqqQII")
"""stamp; kind, name; ticks of start and end; first, second; tick of sending; step, thread"""
LINK = struct.Struct("<QIiQQQQQQQIIIIII")
"""stamp; group; the other rank in the default group; tick of measuring; bytes sent and acknowledged, received; segments
sent; latest rate of delivery in bytes a second; microseconds with data under way, and of these without room at the
other rank; round trip, its variation and the shortest in microseconds; segments sent again; milliseconds for which an
answer is owed; connections"""

WORD_NBYTES = 8
WRITING = 1
OPEN = 2
ENDED_FLAG = 1  # of the header's flags: the process has ended in an orderly way


def state_of(stamp: int) -> int:
    """Returns 0 for a complete entry, `OPEN` or `WRITING`."""
    return stamp & 3


def index_of(stamp: int) -> int:
    """Returns the entry's index, counted from 0 over all that have been written."""
    return stamp >> 8


def first_stamp(index: int) -> int:
    """Returns the smallest stamp that the entry with this index can have; those of earlier ones are smaller."""
    return max(0, index) << 8
