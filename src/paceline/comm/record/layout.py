"""Layout of a recording (native/record/layout.hpp) and the meaning of its fields.

A recording is one block of memory, little-endian: a header, the pairs of times that calibrate its clock, a table of
names, a table of groups, a ring of calls, a ring of events and a table of links. Every entry except a name begins with
a *stamp*: the entry's index, a version that each change increments, and a state: complete, open (the entry will change
again) or being written. A copy of an entry is consistent if the stamp was the same before and after copying.

The codes of dtypes, operations and outcomes are defined by the core in native/reduce/reduce.hpp and
native/call/call.hpp. Tests compare both headers with this file.
"""

from __future__ import annotations

import struct
from enum import IntEnum

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

SEND = 32
RECEIVE = 33
FORMATION = 34  # the formation of a group, recorded as the group's call 0
OPERATIONS = {
    1: "all_reduce",
    2: "broadcast",
    3: "reduce",
    4: "all_gather",
    5: "reduce_scatter",
    6: "gather",
    7: "scatter",
    8: "all_to_all",
    9: "barrier",
    SEND: "send",
    RECEIVE: "recv",
    FORMATION: "new_group",
}

OUTCOMES = {
    0: "ok",
    1: "mismatch",
    2: "timed_out",
    3: "peer_lost",
    4: "interrupted",
    5: "schedule_unfit",
    6: "refused",
    7: "starved",
    8: "too_many_offers",
    9: "aborted",
}


class EventKind(IntEnum):
    """Kind of an event, which determines the meaning of the event's name and of its integers `first` and `second`.

    | kind | name | first | second |
    | --- | --- | --- | --- |
    | SPAN | the user's name | | |
    | VALUE | the user's name | the bits of a double | |
    | STEP | the source of the steps: `ddp`, `elastic`, ... | the step's number | |
    | FORWARD, BACKWARD | the source of the steps | the index of the logical shard, if there are any | |
    | BUCKET | the averaging component: `ddp`, `zero` | the bucket's number | its bytes |
    | OPTIMIZER | the optimizer's class | | |
    | DATA_WAIT | the loader's class | the batch's number | |
    | VIEW_CHANGE | the change | the new view's generation | its number of workers |
    | RECOMPUTE | | the number of shard runs repeated for lost members | |
    | NOT_FINITE | the parameter, or the logged metric | the step | the number of affected gradients |
    | DIFFERENCE | the first tensor that differs between replicas | the step | the first differing rank |
    | CHECKPOINT | `send` or `receive`, for the state of an elastic job | | |
    | CHUNK | the operation of a call staged through host memory | the chunk's number | its bytes |
    | DEVICE | the current phase of a device: `forward`, `backward`, `optimizer` | the device's index | the step |
    | STORE_WAIT | the method of the store and its keys, such as `get 'ready'` | the number of keys | |

    A bucket starts when its last gradient is ready, is sent at `Event.sent_ns`, and ends when its average is available.
    A chunk lasts from the beginning of its copy to host memory until the copy back is enqueued on the device's stream.
    """

    SPAN = 1
    VALUE = 2
    STEP = 3
    FORWARD = 4
    BACKWARD = 5
    BUCKET = 6
    OPTIMIZER = 7
    DATA_WAIT = 8
    VIEW_CHANGE = 9
    RECOMPUTE = 10
    CHECKPOINT = 11
    NOT_FINITE = 12
    DIFFERENCE = 13
    CHUNK = 14
    DEVICE = 15
    STORE_WAIT = 16


MAGIC = int.from_bytes(b"PLRECORD", "little")
VERSION = 2

NBYTES = 1671168

HEADER = struct.Struct("<QIIQ10IIiiIIIQQQQ")
"""magic number, version, header size in bytes, total size in bytes; offset and capacity of pairs, names, groups, calls
and events; pid, rank, world size, clock kind, flags, number of link entries ever used, ticks per second (0: unknown),
time namespace, pair count, name count."""

LINKS_PLACE = struct.Struct("<II")  # offset and capacity of the link table
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
"""stamp, serial number, size, own rank, name, identity, listed members, engine name, ticks of opening and closing, 0"""
GROUP_NBYTES = 512
CALL = struct.Struct("<QIBBBBQQiBBBBQQQQQiIIIiIQQq")
"""stamp; group, operation, dtype, reduction, algorithm; sequence; count; root, state, outcome, asynchronous flag,
unused; ticks of arrival, start and end; bytes sent through shared memory and over TCP; last rank to arrive, first
missing rank; step, thread; tag; call site (see `site_of`); tick at which all ranks had arrived; bit mask of missing
ranks, starting at the first one; predicted nanoseconds (0: no prediction)"""
EVENT = struct.Struct("<QIIQQqqQII")
"""stamp; kind, name; ticks of start and end; `first`, `second`; tick at which a bucket was sent; step, thread"""
LINK = struct.Struct("<QIiQQQQQQQIIIIII")
"""stamp; group; the other rank (in the default group); tick of the measurement; bytes sent and acknowledged, bytes
received; segments sent; latest delivery rate in bytes per second; microseconds with data in flight, and microseconds
limited by the other rank's receive window; round-trip time, its variation and its minimum in microseconds;
retransmitted segments; milliseconds for which an answer has been pending; number of connections"""

LINE_BITS = 22  # number of bits for the line of a call site

WORD_NBYTES = 8
WRITING = 1
OPEN = 2
ENDED_FLAG = 1  # flag in the header: the process has exited normally


def state_of(stamp: int) -> int:
    """Returns the state of an entry: 0 (complete), `OPEN` or `WRITING`."""
    return stamp & 3


def index_of(stamp: int) -> int:
    """Returns the entry's index among all entries that have ever been written, starting at 0."""
    return stamp >> 8


def site_of(site: int) -> tuple[int, int]:
    """Returns the number that identifies a call site's file, and the line number; (0, 0) if there is no call site."""
    return site >> LINE_BITS, site & ((1 << LINE_BITS) - 1)


def first_stamp(index: int) -> int:
    """Returns the smallest stamp of the entry with this index; the stamps of earlier entries are smaller."""
    return max(0, index) << 8
