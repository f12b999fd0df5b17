"""Recording of a process as data: its calls, events, groups and links, and its clock.

All times are nanoseconds of CLOCK_MONOTONIC on the recording process's host, which the processes of a host share.
`Clock.realtime_ns` converts them to the time of day; `ProcessRecording.shifted` converts them to another host's clock.
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
    """State of a call, numbered in this order in a recording."""

    PENDING = "pending"  # waits for earlier calls of its group
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Pair:
    """One instant on three clocks: ticks of the time stamp counter, CLOCK_MONOTONIC and CLOCK_REALTIME."""

    tick: int
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True)
class Clock:
    """Converter from a recording's ticks to times.

    Attributes:
        identity: the boot and the time namespace. Times of processes with the same identity can be compared directly.
        ticks_per_s: the frequency that the processor reports; 0 if it must be computed from the pairs.
        pairs: the calibration, in chronological order.
    """

    identity: str
    ticks_per_s: int
    pairs: tuple[Pair, ...]

    def monotonic_ns(self, tick: int) -> int | None:
        """Returns the time of a tick, interpolated between pairs; None for tick 0, which means no time."""
        if tick == 0 or not self.pairs:
            return None
        index = bisect.bisect(self._ticks, tick)
        pair = self.pairs[max(0, index - 1)]
        return pair.monotonic_ns + round((tick - pair.tick) * self._slopes[index])

    def realtime_ns(self, monotonic_ns: int) -> int:
        """Returns the time of day at an instant, as the clock was set at that time."""
        index = bisect.bisect(self._monotonic, monotonic_ns)
        pair = self.pairs[max(0, index - 1)]
        return monotonic_ns + pair.realtime_ns - pair.monotonic_ns

    @property
    def day_ns(self) -> int:
        """The nanoseconds from CLOCK_MONOTONIC to the time of day, as the clock was set when the recording began."""
        return self.pairs[0].realtime_ns - self.pairs[0].monotonic_ns if self.pairs else 0

    def _slope(self, index: int) -> float:
        """Returns the nanoseconds per tick between the pairs `index - 1` and `index`, or, at the ends, over all."""
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
        serial: the number of the group in its process, from 1, to which `CallRecord.group` refers.
        name: "default", or the name that `new_group` gave it.
        identity: a number that is the same on all members.
        engine: the name of the engine that runs its calls.
        size: the number of its members.
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
        """The group and the kind of device, the same on all members; calls are numbered separately for each device."""
        _, on, device = self.engine.rpartition(" on ")
        return f"{self.identity:x} on {device}" if on and device != "cpu" else f"{self.identity:x}"

    @property
    def device(self) -> str:
        """The type of the device whose tensors its calls take, such as "cuda"; "" for the CPU."""
        return self.key.partition(" on ")[2].partition(" ")[0]


@dataclass(frozen=True)
class CallRecord:
    """A collective, a send or a receive.

    Attributes:
        index: the number of the call in its process.
        group: the serial of its group.
        sequence: the number of the collective in its group, from 1, the same on all ranks; 0 for messages.
        operation, dtype: the names of the operation and the data type, such as "all_reduce" and "float32".
        count: the number of elements.
        root: the root's group rank, the other rank of a message, or None.
        reduction: the reduction's name, such as "sum", or None.
        algorithm: the algorithm's name, such as "ring"; None if the call followed no schedule.
        state: whether the call is pending, running, done or failed.
        outcome: "ok", "timed_out", ...; None while the call has not ended.
        is_async: whether the program did not wait for the call at once.
        arrived_ns: the time at which the program made the call.
        started_ns: the time at which no earlier call of the group was left, or on a device, at which the device had
            done the work before the call; None until then.
        complete_ns: the time at which the last rank was seen to arrive, or None if unknown.
        ended_ns: the time at which the call ended, or None.
        last_arrived: the group rank that arrived last; None if unknown, as between hosts.
        missing: the group ranks whose absence made the call fail (of 64 from the first such rank on).
        shm_nbytes, tcp_nbytes: the bytes that this rank sent through shared memory and over the network.
        step: the latest training step that the process had begun.
        thread: the kernel's id of the calling thread.
        tag: a message's tag; None for collectives.
        predicted_s: the duration that the engine predicted, or None.
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

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self.ended_ns is not None


@dataclass(frozen=True)
class EventRecord:
    """A span or an instant; an instant ends when it starts.

    Attributes:
        end_ns: the end; None while the span lasts.
        sent_ns: the time at which a bucket was sent, or None.
        first, second: integers with the meaning that `EventKind` documents for the kind.
        value: the number of a VALUE, or None.
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
    """Connections of one group to one other rank, as the kernel last measured them.

    Attributes:
        group: the serial of the group.
        peer: the other rank, in the default group.
        measured_ns: the time of the measurement.
        sent_nbytes, received_nbytes: the bytes that were sent and acknowledged, and that were received.
        segments, retransmits: the number of segments that were sent with data, and of those that were retransmitted.
        nbytes_per_s: the latest rate at which data was delivered.
        busy_s, held_s: the time for which data was in flight, and the part of it during which the peer's buffer was
            full.
        round_trip_s, variation_s, least_round_trip_s: the smoothed round-trip time of the slowest connection, its
            variation, and the shortest recent round trip.
        silent_s: the time for which an acknowledgement has been outstanding.
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
    """Recording of one process. Calls and events are the latest ones, in the order in which they began.

    Attributes:
        source: the file, or the process, that the recording was read from.
        worker: the worker's name in an elastic job, otherwise "".
        is_ended: whether the process ended normally, so that its exit handlers ran.
        step: the latest training step that the process began, or 0.
        written_ns: the time of the process's latest record.
        torn: the number of entries that are left out because the process was killed while it wrote them.
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
        """The time at which the process began to record."""
        return self.clock.pairs[0].monotonic_ns if self.clock.pairs else 0

    @property
    def day_ns(self) -> int:
        """The nanoseconds from CLOCK_MONOTONIC to the time of day; see `Clock.day_ns`."""
        return self.clock.day_ns

    def open_calls(self) -> tuple[CallRecord, ...]:
        """Returns the calls that have not ended, oldest first."""
        return tuple(call for call in self.calls if not call.is_over)

    def open_events(self) -> tuple[EventRecord, ...]:
        """Returns the spans that have not ended, oldest first."""
        return tuple(event for event in self.events if event.end_ns is None)

    def shifted(self, offset_ns: int) -> ProcessRecording:
        """Returns the recording with `offset_ns` added to all times, to convert it to another host's clock."""
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
    """Returns the link of an entry of a recording (native/record/layout.hpp, `LinkFields`).

    Args:
        entry: the entry as `layout.LINK` unpacks it.
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
