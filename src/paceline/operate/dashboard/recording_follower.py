"""Incremental reader for one rank's recording, and the breakdown of its training steps.

`operate/diagnosis/recording_reader.py` takes tens of milliseconds to read a whole recording, but the page samples 64
ranks every second. An entry's position is its index modulo the size of the ring (native/record/recorder.cpp), so new
entries form one or two slices. Only complete entries are final; an open entry, such as the current step, is read again
later. Unpacking an entry in Python takes a microsecond. The words needed to select the entries are therefore read as
columns first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.comm.record import layout
from paceline.comm.record.layout import DTYPES, OPERATIONS, EventKind
from paceline.comm.schedule.algorithms import name_of
from paceline.operate.dashboard.job_sample import BucketTiming, CallStatistics, RankStep
from paceline.operate.diagnosis.recording import LinkRecord, link_of

Interval = tuple[float, float]

ReadAt = Callable[[int, int], bytes]  # (offset, number of bytes) -> data

SAMPLES = "samples"
"""The name under which a program logs the number of samples that a rank trains on in a step."""

_RECENT_CALLS, _RECENT_EVENTS = 512, 2048  # maximum number of entries to read at the start or after falling behind
_STEPS_OPEN = 32
_SEQUENCE, _COUNT_OF, _OUTCOME, _IS_ASYNC, _ARRIVED, _STARTED, _ENDED, _COMPLETE = 6, 7, 10, 11, 13, 14, 15, 23
_SHM_WORD, _TCP_WORD, _CALLS_STEP_WORD, _PREDICTED_WORD = 8, 9, 11, 15  # indices of 8-byte words in an entry
_KIND_WORD, _EVENTS_STEP_WORD = 1, 7
_LOW = (1 << 32) - 1
_DOUBLE = struct.Struct("<d")
_INTEGER = struct.Struct("<q")
_COUNT = struct.Struct("<Q")
_HEAD_NBYTES = layout.PROGRESS_AT + layout.PROGRESS.size
# ints, because they compare faster than enumeration members
_VALUE, _STEP, _BUCKET = int(EventKind.VALUE), int(EventKind.STEP), int(EventKind.BUCKET)
_MARKS = frozenset({int(EventKind.VIEW_CHANGE), int(EventKind.CHECKPOINT)})
_PHASES = {
    int(EventKind.DATA_WAIT): "data",
    int(EventKind.FORWARD): "forward",
    int(EventKind.BACKWARD): "backward",
    int(EventKind.OPTIMIZER): "optimizer",
}


class PastCall(NamedTuple):
    """A call that has ended.

    Attributes:
        begin_s, end_s: the times at which the call began and ended.
        complete_s: the time at which the last rank arrived; 0 if unknown.
        is_async: whether the call was asynchronous.
        predicted_s: the duration that the engine predicted; 0 without a prediction.
    """

    begin_s: float
    complete_s: float
    end_s: float
    is_async: bool
    predicted_s: float = 0.0


@dataclass
class StepParts:
    """The recorded parts of one step, with times in seconds."""

    phases: dict[str, list[Interval]] = field(default_factory=dict)
    buckets: list[BucketTiming] = field(default_factory=list)
    calls: list[PastCall] = field(default_factory=list)
    samples: float = 0.0

    def add(self, kind: int, start_s: float, end_s: float) -> None:
        """Adds an event if it is a phase of a step."""
        name = _PHASES.get(kind)
        if name is not None:
            self.phases.setdefault(name, []).append((start_s, end_s))

    def step(self, number: int, begin_s: float, end_s: float) -> RankStep:
        """Returns the step from `begin_s` to `end_s`."""
        buckets = sorted(map(self._without_wait, self.buckets), key=lambda bucket: bucket.ready_s)
        traffic = joined(
            [
                *((bucket.sent_s, bucket.done_s) for bucket in buckets),
                *((call.begin_s, call.end_s) for call in self.calls),
            ]
        )
        exposed = self._exposed(buckets, begin_s, end_s)
        own = {name: without(joined(spans), exposed) for name, spans in self.phases.items()}
        phases = [(name, *span) for name, spans in own.items() for span in spans]
        phases += [("exposed", *span) for span in exposed]
        return RankStep(
            step=number,
            begin_s=begin_s,
            end_s=end_s,
            data_s=length(own.get("data", ())),
            forward_s=length(own.get("forward", ())),
            backward_s=length(own.get("backward", ())),
            exposed_s=length(exposed),
            optimizer_s=length(own.get("optimizer", ())),
            communication_s=length(within(traffic, begin_s, end_s)),
            samples=self.samples,
            phases=tuple(sorted(phases, key=lambda phase: phase[1])),
            buckets=tuple(buckets),
            predicted_s=self._predicted(end_s - begin_s - length(exposed)),
        )

    def _predicted(self, own_s: float) -> float | None:
        """Returns how long the step would have taken if each call had taken its predicted time.

        Buckets are averaged one at a time in the order in which they become ready, as in `operate/plan/step_time.py`.
        Returns None if no call has a prediction, or if a bucket's call has none. Other calls without a prediction
        contribute their actual duration.

        Args:
            own_s: the rank's own time in the step, in seconds.
        """
        if not any(call.predicted_s for call in self.calls):
            return None
        buckets, left = sorted(self.buckets, key=lambda bucket: bucket.ready_s), sorted(self.calls)
        end_s = min((bucket.sent_s for bucket in buckets), default=0.0)
        for bucket in buckets:
            call = next((call for call in left if bucket.ready_s <= call.begin_s and call.end_s <= bucket.done_s), None)
            if call is None or not call.predicted_s:
                return None
            left.remove(call)
            end_s = max(end_s, bucket.ready_s) + call.predicted_s
        exposed_s = max(0.0, end_s - buckets[-1].ready_s) if buckets else 0.0
        waited = (call.predicted_s or call.end_s - call.begin_s for call in left if not call.is_async)
        return own_s + exposed_s + sum(waited)

    def _without_wait(self, bucket: BucketTiming) -> BucketTiming:
        """Returns the bucket with its sending time set to the last rank's arrival at the bucket's call, if known."""
        for call in self.calls:
            if call.complete_s and bucket.ready_s <= call.complete_s and call.end_s <= bucket.done_s:
                return replace(bucket, sent_s=max(bucket.sent_s, call.complete_s))
        return bucket

    def _exposed(self, buckets: Sequence[BucketTiming], begin_s: float, end_s: float) -> list[Interval]:
        """Returns the intervals in which the rank did nothing but wait for communication.

        These are the rank's synchronous calls, and the parts of bucket calls after the last gradient was ready. Before
        that, the backward pass was still computing.
        """
        waits = [(call.begin_s, call.end_s) for call in self.calls if not call.is_async]
        if buckets:
            last_s = buckets[-1].ready_s
            waits += [(max(bucket.ready_s, last_s), bucket.done_s) for bucket in buckets if bucket.done_s > last_s]
        return within(joined(waits), begin_s, end_s)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as sorted, disjoint intervals."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        elif end > start:
            union.append((start, end))
    return union


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Clips disjoint intervals to the range from `begin` to `end`."""
    return [(max(start, begin), min(until, end)) for start, until in intervals if until > begin and start < end]


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Subtracts `holes` from intervals; both must be sorted and disjoint."""
    rest: list[Interval] = []
    for start, end in intervals:
        for begin, until in holes:
            if until <= start:
                continue
            if begin >= end:
                break
            if begin > start:
                rest.append((start, begin))
            start = until
        if start < end:
            rest.append((start, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


class EntryBlock:
    """A copy of consecutive table entries. `complete` lists the positions of complete entries."""

    def __init__(self, data: bytes, entry: struct.Struct, complete: Sequence[int]) -> None:
        self._data = data
        self._entry = entry
        self._words = memoryview(data).cast("Q")
        self.complete = complete

    def column(self, word: int) -> list[int]:
        """Returns one word of each entry. This is much faster than unpacking the entries."""
        return self._words[word :: self._entry.size // 8].tolist()

    def __getitem__(self, position: int) -> tuple[int, ...]:
        return self._entry.unpack_from(self._data, position * self._entry.size)


class EntryRing:
    """Incremental reader for a ring of entries in a recording that is still being written.

    Args:
        entry: the binary format of an entry.
        most: the maximum number of entries to read at a time; None for no limit.
    """

    def __init__(self, entry: struct.Struct, most: int | None) -> None:
        self._entry = entry
        self._most = most
        self._offset = self._capacity = 0
        self._next = 0
        self._incomplete: set[int] = set()

    def reset(self, offset: int, capacity: int) -> None:
        """Restarts from the first entry of a ring that begins at `offset` in the recording."""
        self._offset, self._capacity = offset, capacity
        self._next = 0
        self._incomplete.clear()

    def take(self, read: ReadAt, begun: int) -> tuple[list[EntryBlock], list[tuple[int, ...]]]:
        """Returns the entries completed since the previous call, and the open entries.

        Args:
            read: a function that reads the recording.
            begun: the number of entries that the recorder has begun.
        """
        new: list[EntryBlock] = []
        open_entries: list[tuple[int, ...]] = []
        size = self._entry.size
        for index in sorted(self._incomplete):
            data = read(self._offset + index % self._capacity * size, size)
            if self._is_complete(self._entry.unpack(data), index, open_entries):
                new.append(EntryBlock(data, self._entry, (0,)))
        first = max(self._next, begun - (self._capacity if self._most is None else self._most))
        for start, end in self._slices(first, begun):
            data = read(self._offset + start % self._capacity * size, (end - start) * size)
            block = EntryBlock(data, self._entry, range(end - start))
            incomplete = [
                position
                for position, stamp in enumerate(block.column(0))
                if (stamp >> 8 != start + position or stamp & 3)
                and not self._is_complete(block[position], start + position, open_entries)
            ]
            if incomplete:
                block.complete = sorted(set(block.complete).difference(incomplete))
            new.append(block)
        self._next = begun
        return new, open_entries

    def _slices(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        while first < end:
            until = min(end, (first // self._capacity + 1) * self._capacity)
            yield first, until
            first = until

    def _is_complete(self, entry: tuple[int, ...], index: int, open_entries: list[tuple[int, ...]]) -> bool:
        """Returns True if the slot contains the complete entry `index`. Otherwise, records whether to read it again."""
        stamp, owner = entry[0], entry[0] >> 8
        if stamp == 0 or (owner < index and stamp & 3 == 0):
            self._incomplete.add(index)  # the entry has not been written yet
        elif owner != index:
            self._incomplete.discard(index)  # the slot has a newer entry, or an older open entry that was not replaced
        elif stamp & 3 == 0:
            self._incomplete.discard(index)
            return True
        else:
            self._incomplete.add(index)
            if stamp & 3 == layout.OPEN:
                open_entries.append(entry)
        return False


@dataclass(frozen=True)
class OpenCall:
    """A call that has not ended."""

    operation: str
    dtype: str
    count: int
    sequence: int
    arrived_s: float
    is_async: bool


@dataclass(frozen=True)
class StandaloneEvent:
    """An event that belongs to no step, such as a checkpoint."""

    kind: EventKind
    name: str
    start_s: float
    end_s: float


@dataclass
class RecordingUpdate:
    """New entries in a recording; times are CLOCK_MONOTONIC seconds on its host.

    Attributes:
        step: the current step of the process; None before the first step.
        last_record_s: the time of the process's latest record.
        is_ended: whether the process has exited normally.
        steps: the steps that have ended, in order.
        values: the logged values, as (step, name, value).
        marks: other events that have ended.
        open_calls: the calls that have not ended, oldest first.
        open_kinds: the kinds of events that have not ended.
        shm_nbytes, tcp_nbytes: the numbers of bytes sent by completed calls through shared memory and over the network.
        links: the latest measurements of connections to ranks on other hosts.
        calls: the successful calls with predictions, one entry per kind.
    """

    step: int | None = None
    last_record_s: float = 0.0
    is_ended: bool = False
    steps: list[RankStep] = field(default_factory=list)
    values: list[tuple[int, str, float]] = field(default_factory=list)
    marks: list[StandaloneEvent] = field(default_factory=list)
    open_calls: list[OpenCall] = field(default_factory=list)
    open_kinds: set[EventKind] = field(default_factory=set)
    shm_nbytes: int = 0
    tcp_nbytes: int = 0
    links: list[LinkRecord] = field(default_factory=list)
    calls: list[CallStatistics] = field(default_factory=list)


class RecordingFollower:
    """Incremental reader for one growing recording.

    Args:
        read: a function that reads bytes of the recording at an offset.
        is_whole: whether to read all entries (for a report) instead of only recent ones.
        shift_s: the seconds to add to all times.
    """

    def __init__(self, read: ReadAt, is_whole: bool = False, shift_s: float = 0.0) -> None:
        self._read = read
        self._shift_s = shift_s
        self._places: list[tuple[int, int]] = []  # table offsets and capacities: pairs, names, groups, calls, events
        self._names: dict[int, str] = {}
        self._origin = (0, 0.0, 1e-9)  # a reference tick, its time in seconds, and the seconds per tick
        self._calls = EntryRing(layout.CALL, None if is_whole else _RECENT_CALLS)
        self._events = EntryRing(layout.EVENT, None if is_whole else _RECENT_EVENTS)
        self._parts: dict[int, StepParts] = {}  # parts of the steps that have not ended, by step
        self._samples = 0  # index of the name `SAMPLES` in the name table, once known
        self._counts: dict[str, int] = {}  # number of values logged under each name, in a program without steps
        self.rank: int | None = None
        self.pid = 0
        self.host = ""

    @classmethod
    def of_descriptor(cls, fd: int) -> RecordingFollower:
        """Creates a follower for the recording to which a descriptor refers. The caller closes the descriptor."""
        return cls(lambda offset, nbytes: os.pread(fd, nbytes, offset))

    def update(self, stride: int = 1) -> RecordingUpdate | None:
        """Returns the new entries, or None if the process has not begun to record.

        Args:
            stride: the interval between returned steps. For example, 2 returns every second step, to save time with
                many ranks.
        """
        head = self._read(0, _HEAD_NBYTES)
        if len(head) < _HEAD_NBYTES or _COUNT.unpack_from(head)[0] != layout.MAGIC:
            return None
        fields = layout.HEADER.unpack_from(head)
        if fields[1] != layout.VERSION:
            return None
        if not self._places or fields[14] != self.pid:
            self._begin(fields)
        if fields[15] >= 0:
            self.rank = fields[15]
        self._measure_clock()
        tick, step = layout.PROGRESS.unpack_from(head, layout.PROGRESS_AT)
        update = RecordingUpdate(
            step=step or None, last_record_s=self._time(tick), is_ended=bool(fields[18] & layout.ENDED_FLAG)
        )
        self._take_calls(_COUNT.unpack_from(head, layout.CALLS_BEGUN_AT)[0], stride, update)
        if fields[19]:
            self._take_links(head, fields[19], update)
        self._take_events(_COUNT.unpack_from(head, layout.EVENTS_BEGUN_AT)[0], stride, update)
        for old in [number for number in self._parts if number < (step or 0) - _STEPS_OPEN]:
            del self._parts[old]
        return update

    def _begin(self, fields: tuple[int, ...]) -> None:
        """Reads the constant part of a process's recording and drops data from the previous process."""
        self.pid = fields[14]
        self._places = list(zip(fields[4:14:2], fields[5:14:2], strict=True))
        self.host = self._text(layout.HOST_AT, layout.HOST_NBYTES)
        self._names.clear()
        self._samples = 0
        self._parts.clear()
        self._calls.reset(*self._places[3])
        self._events.reset(*self._places[4])

    def _measure_clock(self) -> None:
        offset, capacity = self._places[0]
        data = self._read(offset, capacity * layout.PAIR.size)
        pairs = sorted(pair[1:3] for pair in layout.PAIR.iter_unpack(data) if pair[1] and not layout.state_of(pair[0]))
        if pairs:
            (first, first_ns), (last, last_ns) = pairs[0], pairs[-1]
            slope = (last_ns - first_ns) / (last - first) if last > first else 1.0
            self._origin = (last, last_ns / 1e9 + self._shift_s, slope / 1e9)

    def _time(self, tick: int) -> float:
        origin, second, slope = self._origin
        return second + (tick - origin) * slope

    def _take_calls(self, begun: int, stride: int, update: RecordingUpdate) -> None:
        new, open_entries = self._calls.take(self._read, begun)
        took: dict[tuple[int, ...], tuple[int, float, float]] = {}
        words = (_SHM_WORD, _TCP_WORD, _CALLS_STEP_WORD, _PREDICTED_WORD)
        for block in new:
            shm, tcp, steps, predicted = (block.column(word) for word in words)
            for position in block.complete:
                update.shm_nbytes += shm[position]
                update.tcp_nbytes += tcp[position]
                step, predicted_s = steps[position] & _LOW, predicted[position] / 1e9
                is_used = bool(step and not step % stride)
                if not is_used and not predicted_s:
                    continue
                entry = block[position]
                call = self._past_call(entry, predicted_s)
                if is_used:
                    self._parts.setdefault(step, StepParts()).calls.append(call)
                if predicted_s and not entry[_OUTCOME]:
                    kind = (entry[2], entry[3], entry[_COUNT_OF], entry[5])
                    calls, seconds, _ = took.get(kind, (0, 0.0, 0.0))
                    took[kind] = calls + 1, seconds + call.end_s - call.begin_s, predicted_s
        update.calls = [_call_statistics(kind, *totals) for kind, totals in took.items()]
        for entry in open_entries:
            operation, dtype = OPERATIONS.get(entry[2], "a call"), DTYPES[entry[3]] if entry[3] < len(DTYPES) else ""
            arrived_s = self._time(entry[_ARRIVED])
            numbers = (entry[_COUNT_OF], entry[_SEQUENCE])
            update.open_calls.append(OpenCall(operation, dtype, *numbers, arrived_s, bool(entry[_IS_ASYNC])))

    def _past_call(self, entry: tuple[int, ...], predicted_s: float) -> PastCall:
        is_async = bool(entry[_IS_ASYNC])
        start = entry[_STARTED] or entry[_ARRIVED] if is_async else entry[_ARRIVED]
        complete_s = self._time(entry[_COMPLETE]) if entry[_COMPLETE] else 0.0
        return PastCall(self._time(start), complete_s, self._time(entry[_ENDED]), is_async, predicted_s)

    def _take_events(self, begun: int, stride: int, update: RecordingUpdate) -> None:
        ended: list[tuple[int, float, float]] = []
        new, open_entries = self._events.take(self._read, begun)
        update.open_kinds = {EventKind(entry[1]) for entry in open_entries}
        for entry in self._used_events(new, stride):
            _, kind, name, start, end, first, second, sent, step, _ = entry
            if kind == _VALUE:
                value = _DOUBLE.unpack(_INTEGER.pack(first))[0]
                text = self._name(name)
                if text == SAMPLES:
                    self._samples = name
                    self._parts.setdefault(step, StepParts()).samples += value
                else:
                    if not step:  # the program does not mark steps, so values are numbered instead
                        step = self._counts[text] = self._counts.get(text, 0) + 1
                    update.values.append((step, text, value))
            elif kind == _STEP:
                ended.append((first, self._time(start), self._time(end)))
            elif kind == _BUCKET:
                began_s = self._time(start)
                sent_s = self._time(sent) if sent else began_s
                bucket = BucketTiming(began_s, sent_s, self._time(end), second)
                self._parts.setdefault(step, StepParts()).buckets.append(bucket)
            elif kind in _MARKS:
                mark = StandaloneEvent(EventKind(kind), self._name(name), self._time(start), self._time(end))
                update.marks.append(mark)
            else:
                self._parts.setdefault(step, StepParts()).add(kind, self._time(start), self._time(end))
        for number, begin_s, end_s in sorted(ended):
            update.steps.append(self._parts.pop(number, StepParts()).step(number, begin_s, end_s))

    def _used_events(self, new: Sequence[EntryBlock], stride: int) -> Iterator[tuple[int, ...]]:
        """Yields all events in every `stride`-th step; in other steps, only marks and values other than `SAMPLES`."""
        for block in new:
            kinds, steps = block.column(_KIND_WORD), block.column(_EVENTS_STEP_WORD)
            for position in block.complete:
                step, kind = steps[position] & _LOW, kinds[position] & _LOW
                is_used = step and not step % stride
                if is_used or kind in _MARKS or (kind == _VALUE and kinds[position] >> 32 != self._samples):
                    yield block[position]

    def _take_links(self, head: bytes, used: int, update: RecordingUpdate) -> None:
        offset, capacity = layout.LINKS_PLACE.unpack_from(head, layout.LINKS_PLACE_AT)
        data = self._read(offset, min(used, capacity) * layout.LINK.size)
        for entry in layout.LINK.iter_unpack(data):
            if entry[0] and layout.state_of(entry[0]) != layout.WRITING:
                update.links.append(link_of(entry, lambda tick: round(self._time(tick) * 1e9)))

    def _name(self, number: int) -> str:
        if not number:
            return ""
        if number not in self._names:
            offset = self._places[1][0] + (number - 1) * layout.NAME_NBYTES
            self._names[number] = self._text(offset, layout.NAME_NBYTES)
        return self._names[number]

    def _text(self, offset: int, nbytes: int) -> str:
        return self._read(offset, nbytes).split(b"\0", 1)[0].decode(errors="replace")


def _call_statistics(kind: tuple[int, ...], calls: int, took_s: float, predicted_s: float) -> CallStatistics:
    operation, dtype, count, algorithm = kind
    name = DTYPES[dtype] if dtype < len(DTYPES) else ""
    return CallStatistics(
        OPERATIONS.get(operation, "a call"), name, count, name_of(algorithm) or "", calls, took_s, predicted_s
    )
