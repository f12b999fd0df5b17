"""What a process recorded, as data: its calls, its events, its groups, its links, and the clock that its times are of.

All times are nanoseconds of CLOCK_MONOTONIC on the recording process's host, which the processes of a host share.
`Clock.realtime_ns` converts them to the time of day; `Recording.shifted` moves them to another host's clock.

Takes an entry of a recording's links apart (native/record/layout.hpp, `LinkFields`).
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
    """How far a call has come."""

    PENDING = "pending"  # behind others of its group, which it waits for
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Pair:
    """One instant on the three clocks: ticks of the time stamp counter, CLOCK_MONOTONIC and CLOCK_REALTIME."""

    tick: int
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True)
class Clock:
    """Converts the ticks of a recording to times; `pairs` are ordered.

    Attributes:
        identity: is the same for two processes if their times can be compared without an offset: they run on the same
            kernel, since the same boot and in the same time namespace.
        ticks_per_s: the frequency if the processor states it, otherwise 0; then it follows from the pairs.
    """

    identity: str
    ticks_per_s: int
    pairs: tuple[Pair, ...]

    def monotonic_ns(self, tick: int) -> int | None:
        """Returns the time of a tick by the pairs around it; None for tick 0, which stands for no time."""
        if tick == 0 or not self.pairs:
            return None
        at = bisect.bisect(self._ticks, tick)
        pair = self.pairs[max(0, at - 1)]
        return pair.monotonic_ns + round((tick - pair.tick) * self._slopes[at])

    def realtime_ns(self, monotonic_ns: int) -> int:
        """Returns the time of day at that instant, as the clock was set at the time."""
        at = bisect.bisect(self._monotonic, monotonic_ns)
        pair = self.pairs[max(0, at - 1)]
        return monotonic_ns + pair.realtime_ns - pair.monotonic_ns

    @property
    def day_ns(self) -> int:
        """What is added to its times to get the time of day, as the clock was set when the recording began."""
        return self.pairs[0].realtime_ns - self.pairs[0].monotonic_ns if self.pairs else 0

    def _slope(self, at: int) -> float:
        """Returns the nanoseconds a tick between the pairs before and behind place `at`."""
        first, last = self.pairs[0], self.pairs[-1]
        if 0 < at < len(self.pairs):
            first, last = self.pairs[at - 1], self.pairs[at]
        if last.tick > first.tick:
            return (last.monotonic_ns - first.monotonic_ns) / (last.tick - first.tick)
        return 1e9 / self.ticks_per_s if self.ticks_per_s else 1.0

    @cached_property
    def _slopes(self) -> list[float]:
        return [self._slope(at) for at in range(len(self.pairs) + 1)]

    @cached_property
    def _ticks(self) -> list[int]:
        return [pair.tick for pair in self.pairs]

    @cached_property
    def _monotonic(self) -> list[int]:
        return [pair.monotonic_ns for pair in self.pairs]


@dataclass(frozen=True)
class GroupRecord:
    """A process group. `ranks[r]` is group rank r's rank in the default group; empty if they are too many to be listed.

    Attributes:
        serial: by which `Call.group` names it; counts the groups of the process from 1.
        name: "default", or what `new_group` called it.
        identity: the same on all members.
        closed_ns: when it was destroyed; None while it exists.
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


@dataclass(frozen=True)
class CallRecord:
    """A collective, a send or a receive.

    Attributes:
        index: counts the calls of the process, in the order in which they were made.
        group: the serial of its group.
        sequence: counts the collectives of the group from 1, alike on all of its ranks; 0 for messages.
        root: the root's group rank, the other rank of a message, or None.
        reduction: "sum" and so on; None where the operation has none.
        algorithm: "ring" and so on; None if the call followed no schedule.
        arrived_ns: when the program called; `started_ns`: when nothing of the group was before it any more.
        complete_ns: when the last rank was seen to have come; None if that is not known.
        last_arrived: the group rank that came last; None if that is not known, as between hosts.
        outcome: "ok", "timed_out", ...; None while it is not over.
        missing: the group ranks that did not come, where a call failed for that (of 64 from the first such rank on).
        shm_nbytes: bytes that this rank sent through shared memory; `tcp_nbytes`: over the network.
        step: the latest training step that the process had begun.
        thread: the kernel's number of the thread that called.
        tag: a message's tag; None for collectives.
        predicted_s: how long the engine expected the call to take; None if nothing predicted it.
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
        """Whether the call has ended, well or not."""
        return self.ended_ns is not None


@dataclass(frozen=True)
class EventRecord:
    """A span, which has an end unless it still lasts, or an instant, whose end is its start.

    `first` and `second` mean what `EventKind` says for each kind; `value` is the number that a VALUE carries.
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
    """What the kernel knew of the connections of one group to one other rank, when they were last measured.

    Attributes:
        group: the serial of the group.
        peer: the other rank, in the default group.
        sent_nbytes: those that arrived; `received_nbytes` those that came.
        nbytes_per_s: the latest rate at which data was delivered.
        busy_s: for how long data was under way; `held_s` for how much of it the other rank had no room for more.
        round_trip_s: the usual round trip, of the slowest of the connections; `variation_s` how much it varies;
            `least_round_trip_s` the shortest lately.
        segments: how many were sent with data; `retransmits` how many were sent again.
        silent_s: for how long the other host had owed an answer.
        connections: how many there are.
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
    """What one process recorded; calls and events are the latest ones, in the order in which they began.

    Attributes:
        source: the file, or the process, that it was read from.
        worker: the worker's name in an elastic job, "" elsewhere.
        is_ended: whether the process has ended in an orderly way: its exit handlers ran.
        step: the latest training step that it began, 0 before the first.
        written_ns: when it wrote its latest record.
        torn: entries that were being written when a process that was killed died; they are left out.
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
        """When the process began to record."""
        return self.clock.pairs[0].monotonic_ns if self.clock.pairs else 0

    @property
    def day_ns(self) -> int:
        """What is added to its times to get the time of day, as the clock was set when the recording began."""
        return self.clock.day_ns

    def open_calls(self) -> tuple[CallRecord, ...]:
        """Returns the calls that are not over, oldest first."""
        return tuple(call for call in self.calls if not call.is_over)

    def open_events(self) -> tuple[EventRecord, ...]:
        """Returns the spans that still last, oldest first: where the process is, as far as it has told."""
        return tuple(event for event in self.events if event.end_ns is None)

    def shifted(self, offset_ns: int) -> ProcessRecording:
        """Returns the recording with `offset_ns` added to all times, which puts it on another host's clock."""
        pairs = tuple(replace(pair, monotonic_ns=pair.monotonic_ns + offset_ns) for pair in self.clock.pairs)
        return replace(
            self,
            written_ns=_moved(self.written_ns, offset_ns),
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


def _moved(time_ns: int | None, offset_ns: int) -> int | None:
    return None if time_ns is None else time_ns + offset_ns


def link_of(entry: tuple[int, ...], time_ns: Callable[[int], int]) -> LinkRecord:
    """Returns the link of an entry as `layout.LINK` unpacks it; `time_ns` converts its tick."""
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
