"""Data classes for the recording of a process: its calls, events, groups, links and clock.

All times are CLOCK_MONOTONIC nanoseconds on the host of the recorded process. All processes on a host share this clock.
`Clock.realtime_ns` converts these times to the time of day, and `ProcessRecording.shifted` converts them to another
host's clock.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

from paceline.comm.record.layout import EventKind


class CallStatus(Enum):
    """Status of a call. A recording stores a status as its index in this enumeration."""

    PENDING = "pending"  # queued after earlier calls in the same group
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Pair:
    """One instant on three clocks: time stamp counter, CLOCK_MONOTONIC and CLOCK_REALTIME."""

    tick: int
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True)
class Clock:
    """Converts the ticks in a recording to times.

    Attributes:
        identity: the boot id and the time namespace. Processes with the same identity have comparable times.
        ticks_per_s: the tick frequency reported by the processor; 0 if it must be computed from `pairs`.
        pairs: the calibration, in chronological order.
    """

    identity: str
    ticks_per_s: int
    pairs: tuple[Pair, ...]

    def monotonic_ns(self, tick: int) -> int | None:
        """Converts a tick to a time by interpolating between pairs; returns None for tick 0, which means "no time"."""
        if tick == 0 or not self.pairs:
            return None
        index = bisect.bisect(self._ticks, tick)
        pair = self.pairs[max(0, index - 1)]
        return pair.monotonic_ns + round((tick - pair.tick) * self._slopes[index])

    def realtime_ns(self, monotonic_ns: int) -> int:
        """Converts a time to the time of day, according to the system clock at that moment."""
        index = bisect.bisect(self._monotonic, monotonic_ns)
        pair = self.pairs[max(0, index - 1)]
        return monotonic_ns + pair.realtime_ns - pair.monotonic_ns

    @property
    def day_ns(self) -> int:
        """The difference between the time of day and CLOCK_MONOTONIC when the recording began, in nanoseconds."""
        return self.pairs[0].realtime_ns - self.pairs[0].monotonic_ns if self.pairs else 0

    def _slope(self, index: int) -> float:
        """Returns the nanoseconds per tick between pairs `index - 1` and `index`, or the average beyond either end."""
        first, last = self.pairs[0], self.pairs[-1]
        if 0 < index < len(self.pairs):
            first, last = self.pairs[index - 1], self.pairs[index]
        if last.tick > first.tick:
            return (last.monotonic_ns - first.monotonic_ns) / (last.tick - first.tick)
        return 1e9 / self.ticks_per_s if self.ticks_per_s else 1.0

    @cached_property
    def _slopes(self) -> list[float]:
        return [self._slope(index) for index in range(len(self.pairs) + 1)]

    @cached_property
    def _ticks(self) -> list[int]:
        return [pair.tick for pair in self.pairs]

    @cached_property
    def _monotonic(self) -> list[int]:
        return [pair.monotonic_ns for pair in self.pairs]


@dataclass(frozen=True)
class GroupRecord:
    """A process group.

    Attributes:
        serial: the number of the group in its process, starting at 1. `CallRecord.group` contains this number.
        name: "default", or the name assigned by `new_group`.
        identity: a number that is the same on all members of the group.
        engine: the name of the engine that runs the group's calls.
        size: the number of members.
        rank: this process's rank in the group.
        ranks: the members' ranks in the default group; empty if there are too many to record.
        opened_ns: the time at which the group was created.
        closed_ns: the time at which the group was destroyed; None while it exists.
    """

    serial: int
    name: str
    identity: int
    engine: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    opened_ns: int | None
    closed_ns: int | None

    @property
    def key(self) -> str:
        """The group identity and device type, the same on all members. Each device type has its own call numbers."""
        _, on, device = self.engine.rpartition(" on ")
        return f"{self.identity:x} on {device}" if on and device != "cpu" else f"{self.identity:x}"

    @property
    def device(self) -> str:
        """The type of device that the group's tensors are on, such as "cuda"; "" for the CPU."""
        return self.key.partition(" on ")[2].partition(" ")[0]


@dataclass(frozen=True)
class CallRecord:
    """A collective, a send or a receive.

    Attributes:
        index: the number of the call in its process.
        group: the serial of its group.
        sequence: the number of the collective in its group, starting at 1, the same on all ranks; 0 for messages
            and for the formation of the group, which is recorded as the call `new_group`.
        operation, dtype: the names of the operation and of the data type, such as "all_reduce" and "float32".
        count: the number of tensor elements.
        root: the group rank of the root, or of the peer for messages; None for calls without a root.
        reduction: the name of the reduction, such as "sum", or None.
        algorithm: the name of the algorithm, such as "ring"; None if the call did not use a schedule.
        state: whether the call is pending, running, done or failed.
        outcome: the result, such as "ok" or "timed_out"; None until the call has ended.
        is_async: whether the call was asynchronous.
        arrived_ns: the time at which the program made the call.
        started_ns: the time at which the last earlier call in the group ended or, for a call on a device, the time at
            which the device completed all earlier work; None until then.
        complete_ns: the time at which this rank detected the last rank's arrival, or None if unknown.
        ended_ns: the time at which the call ended, or None.
        last_arrived: the group rank that arrived last; None if unknown, for example between hosts.
        missing: the group ranks whose absence made the call fail. Only the first such rank and the 63 ranks after it
            are recorded.
        shm_nbytes, tcp_nbytes: the numbers of bytes that this rank sent through shared memory and over the network.
        step: the latest training step that the process had begun when it made the call.
        thread: the kernel thread id of the caller.
        tag: the tag of a message; None for collectives.
        predicted_s: the duration that the engine predicted, or None.
        line: the line of the user's program that made the call, such as "train.py:71", or None if unknown.
    """

    index: int
    group: int
    sequence: int
    operation: str
    dtype: str
    count: int
    root: int | None
    reduction: str | None
    algorithm: str | None
    state: CallStatus
    outcome: str | None
    is_async: bool
    arrived_ns: int
    started_ns: int | None
    complete_ns: int | None
    ended_ns: int | None
    last_arrived: int | None
    missing: tuple[int, ...]
    shm_nbytes: int
    tcp_nbytes: int
    step: int
    thread: int
    tag: int | None
    predicted_s: float | None = None
    line: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, successfully or not."""
        return self.ended_ns is not None


@dataclass(frozen=True)
class EventRecord:
    """A span or an instant. For an instant, the start and the end are equal.

    Attributes:
        end_ns: the end of the span; None until it has ended.
        sent_ns: the time at which a bucket was sent; None for other events.
        first, second: two integers whose meaning depends on the kind and is documented in `EventKind`.
        value: the logged number if the kind is VALUE, otherwise None.
    """

    index: int
    kind: EventKind
    name: str | None
    start_ns: int
    end_ns: int | None
    sent_ns: int | None
    first: int
    second: int
    value: float | None
    step: int
    thread: int


@dataclass(frozen=True)
class LinkRecord:
    """The connections of one group to one other rank, as last measured by the kernel.

    Attributes:
        group: the serial number of the group.
        peer: the other rank's number in the default group.
        measured_ns: the time of the measurement.
        sent_nbytes, received_nbytes: the numbers of acknowledged and received bytes.
        segments, retransmits: the numbers of data segments sent and retransmitted.
        nbytes_per_s: the latest delivery rate, in bytes per second.
        busy_s, held_s: the time during which data was in flight, and the part of that time during which the peer's
            receive buffer was full.
        round_trip_s, variation_s, least_round_trip_s: the smoothed round-trip time on the slowest connection, its
            variation, and the shortest recent round-trip time.
        silent_s: the time that an acknowledgment has been outstanding.
        connections: the number of connections.
    """

    group: int
    peer: int
    measured_ns: int
    sent_nbytes: int
    received_nbytes: int
    segments: int
    nbytes_per_s: int
    busy_s: float
    held_s: float
    round_trip_s: float
    variation_s: float
    least_round_trip_s: float
    retransmits: int
    silent_s: float
    connections: int


@dataclass(frozen=True)
class ProcessRecording:
    """The recording of one process, with its latest calls and events in order of start time.

    Attributes:
        source: the file or process from which the recording was read.
        worker: the worker's name in an elastic job; "" in other jobs.
        is_ended: whether the process exited normally and ran its exit handlers.
        step: the latest training step that the process began; 0 if there is none.
        written_ns: the time of the process's latest record.
        torn: the number of omitted entries, which were incomplete because the process was killed while writing them.
    """

    source: str
    pid: int
    rank: int | None
    world_size: int | None
    worker: str
    host: str
    is_ended: bool
    step: int
    written_ns: int | None
    clock: Clock
    groups: dict[int, GroupRecord]
    calls: tuple[CallRecord, ...]
    events: tuple[EventRecord, ...]
    links: tuple[LinkRecord, ...] = ()
    torn: int = 0

    @property
    def started_ns(self) -> int:
        """The time at which the recording began."""
        return self.clock.pairs[0].monotonic_ns if self.clock.pairs else 0

    @property
    def day_ns(self) -> int:
        """See `Clock.day_ns`."""
        return self.clock.day_ns

    def open_calls(self) -> tuple[CallRecord, ...]:
        """Returns the calls that have not ended, oldest first."""
        return tuple(call for call in self.calls if not call.is_over)

    def open_events(self) -> tuple[EventRecord, ...]:
        """Returns the spans that have not ended, oldest first."""
        return tuple(event for event in self.events if event.end_ns is None)

    def shifted(self, offset_ns: int) -> ProcessRecording:
        """Converts the recording to another host's clock by adding `offset_ns` to all times."""
        pairs = tuple(replace(pair, monotonic_ns=pair.monotonic_ns + offset_ns) for pair in self.clock.pairs)
        return replace(
            self,
            written_ns=None if self.written_ns is None else self.written_ns + offset_ns,
            clock=replace(self.clock, pairs=pairs),
            groups={serial: _shifted(group, offset_ns) for serial, group in self.groups.items()},
            calls=tuple(_shifted(call, offset_ns) for call in self.calls),
            events=tuple(_shifted(event, offset_ns) for event in self.events),
            links=tuple(_shifted(link, offset_ns) for link in self.links),
        )


_Entry = TypeVar("_Entry", CallRecord, EventRecord, GroupRecord, LinkRecord)


def _shifted(entry: _Entry, offset_ns: int) -> _Entry:
    times = {name: value for name, value in vars(entry).items() if name.endswith("_ns") and value is not None}
    return replace(entry, **{name: value + offset_ns for name, value in times.items()})


def link_of(entry: tuple[int, ...], time_ns: Callable[[int], int]) -> LinkRecord:
    """Converts an entry in the link table (`LinkFields` in native/record/layout.hpp).

    Args:
        entry: the entry as unpacked by `layout.LINK`.
        time_ns: a function that converts a tick to nanoseconds.
    """
    _, group, peer, measured, sent, received, segments, rate, busy, held, trip, variation, least = entry[:13]
    retransmits, silent, connections = entry[13:]
    return LinkRecord(
        group=group,
        peer=peer,
        measured_ns=time_ns(measured),
        sent_nbytes=sent,
        received_nbytes=received,
        segments=segments,
        nbytes_per_s=rate,
        busy_s=busy / 1e6,
        held_s=held / 1e6,
        round_trip_s=trip / 1e6,
        variation_s=variation / 1e6,
        least_round_trip_s=least / 1e6,
        retransmits=retransmits,
        silent_s=silent / 1e3,
        connections=connections,
    )
