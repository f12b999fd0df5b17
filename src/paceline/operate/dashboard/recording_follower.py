"""Follows one rank's recording while it grows, by reading only what is new.

`operate/diagnosis/recording_reader.py` reads a whole recording, which takes tens of milliseconds; the page looks at 64 ranks every
second. An entry's place is its index modulo the table's size (native/record/recorder.cpp), hence the new ones are one
or two slices. Only complete entries are taken, which no longer change: one that is still open, such as the step in
progress, is looked at again.

Turns what a rank recorded into its training steps: how long each part took, and what was exposed.

A ring of entries in a recording that grows, read bit by bit: only what is new, and only what is wanted of it.

An entry's place is its index modulo the ring's size (native/record/recorder.cpp), hence the new ones are one or two
slices. To take an entry apart takes Python a microsecond, which counts with 64 ranks; therefore the words that tell
which entries are wanted can be read as columns.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.comm.record import layout
from paceline.comm.record.layout import DTYPES, OPERATIONS, EventKind
from paceline.comm.schedule.registry import name_of
from paceline.operate.dashboard.job_sample import BucketTiming, CallTally, RankStep
from paceline.operate.diagnosis.recording import LinkRecord, link_of

Interval = tuple[float, float]

SAMPLES = "samples"
"""The name under which a program logs how many samples a rank trains on in a step."""

_PHASES = {
    int(EventKind.DATA_WAIT): "data",
    int(EventKind.FORWARD): "forward",
    int(EventKind.BACKWARD): "backward",
    int(EventKind.OPTIMIZER): "optimizer",
}


class PastCall(NamedTuple):
    """A call that is over: when it began, when all ranks had come (0 if that is not known), and when it ended.

    `predicted_s` is how long the engine expected it to take, 0 if it did not say.
    """

    begin_s: float
    complete_s: float
    end_s: float
    is_async: bool
    predicted_s: float = 0.0


@dataclass
class Pieces:
    """What was recorded of one step so far, in seconds."""

    phases: dict[str, list[Interval]] = field(default_factory=dict)
    buckets: list[BucketTiming] = field(default_factory=list)
    calls: list[PastCall] = field(default_factory=list)
    samples: float = 0.0

    def add(self, kind: int, start_s: float, end_s: float) -> None:
        """Adds a phase, if the event is one."""
        name = _PHASES.get(kind)
        if name is not None:
            self.phases.setdefault(name, []).append((start_s, end_s))

    def step(self, number: int, begin_s: float, end_s: float) -> RankStep:
        """Returns the step, which lasted from `begin_s` to `end_s`."""
        buckets = sorted(map(self._met, self.buckets), key=lambda bucket: bucket.ready_s)
        spans = [
            *((each.sent_s, each.done_s) for each in buckets),
            *((each.begin_s, each.end_s) for each in self.calls),
        ]
        traffic = joined(spans)
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
        """Returns what the step would have lasted if its calls had taken what was predicted.

        `own_s` is the rank's part of it, without waits.

        Buckets are averaged one after another, each when it is ready, as in `operate/plan/step_time.py`. A call that nothing
        predicted counts as it was, unless a bucket waits for it.
        """
        if not any(each.predicted_s for each in self.calls):
            return None
        buckets, left = sorted(self.buckets, key=lambda each: each.ready_s), sorted(self.calls)
        end_s = min((each.sent_s for each in buckets), default=0.0)
        for bucket in buckets:
            call = next((each for each in left if bucket.ready_s <= each.begin_s and each.end_s <= bucket.done_s), None)
            if call is None or not call.predicted_s:
                return None
            left.remove(call)
            end_s = max(end_s, bucket.ready_s) + call.predicted_s
        exposed_s = max(0.0, end_s - buckets[-1].ready_s) if buckets else 0.0
        waited = (each.predicted_s or each.end_s - each.begin_s for each in left if not each.is_async)
        return own_s + exposed_s + sum(waited)

    def _met(self, bucket: BucketTiming) -> BucketTiming:
        """Returns the bucket with the time at which all ranks had come to its call, where it is known."""
        for call in self.calls:
            if call.complete_s and bucket.ready_s <= call.complete_s and call.end_s <= bucket.done_s:
                return replace(bucket, sent_s=max(bucket.sent_s, call.complete_s))
        return bucket

    def _exposed(self, buckets: Sequence[BucketTiming], begin_s: float, end_s: float) -> list[Interval]:
        """Returns when the rank did nothing but wait for communication.

        Those are its synchronous calls, and what is left of the buckets after the last gradient was there: until then
        backward computes.
        """
        waits = [(each.begin_s, each.end_s) for each in self.calls if not each.is_async]
        if buckets:
            last_ready_s = buckets[-1].ready_s
            waits += [(max(each.ready_s, last_ready_s), each.done_s) for each in buckets if each.done_s > last_ready_s]
        return within(joined(waits), begin_s, end_s)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        elif end > start:
            union.append((start, end))
    return union


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Returns the parts of disjoint intervals between `begin` and `end`."""
    return [(max(start, begin), min(until, end)) for start, until in intervals if until > begin and start < end]


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Returns disjoint intervals without the parts that lie in `holes`, which are disjoint and in order too."""
    rest: list[Interval] = []
    for start, end in intervals:
        at = start
        for begin, until in holes:
            if until <= at:
                continue
            if begin >= end:
                break
            if begin > at:
                rest.append((at, begin))
            at = until
        if at < end:
            rest.append((at, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """Returns the length of disjoint intervals together."""
    return sum(end - start for start, end in intervals)


ReadAt = Callable[[int, int], bytes]  # (offset, bytes) -> what is there


class Entries:
    """Entries that lie behind each other in a copy of a table; `complete` are the places of those that are whole."""

    def __init__(self, data: bytes, entry: struct.Struct, complete: Sequence[int]) -> None:
        self._data = data
        self._entry = entry
        self._words = memoryview(data).cast("Q")
        self.complete = complete

    def column(self, word: int) -> list[int]:
        """Returns one word of each entry, which takes a fraction of the time that taking them apart does."""
        return self._words[word :: self._entry.size // 8].tolist()

    def __getitem__(self, place: int) -> tuple[int, ...]:
        return self._entry.unpack_from(self._data, place * self._entry.size)


class Table:
    """A ring of entries of which those up to some index have been seen."""

    def __init__(self, entry: struct.Struct, most: int | None) -> None:
        self._entry = entry
        self._most = most
        self._offset = self._capacity = 0
        self._next = 0
        self._lasting: set[int] = set()

    def place(self, offset: int, capacity: int) -> None:
        """Begins anew, with the ring at another place."""
        self._offset, self._capacity = offset, capacity
        self._next = 0
        self._lasting.clear()

    def take(self, read: ReadAt, begun: int) -> tuple[list[Entries], list[tuple[int, ...]]]:
        """Returns the entries that have been completed since the last call, and those that are open."""
        new: list[Entries] = []
        lasting: list[tuple[int, ...]] = []
        size = self._entry.size
        for index in sorted(self._lasting):
            data = read(self._offset + index % self._capacity * size, size)
            if self._is_complete(self._entry.unpack(data), index, lasting):
                new.append(Entries(data, self._entry, (0,)))
        first = max(self._next, begun - (self._capacity if self._most is None else self._most))
        for start, end in self._slices(first, begun):
            data = read(self._offset + start % self._capacity * size, (end - start) * size)
            entries = Entries(data, self._entry, range(end - start))
            odd = [
                place
                for place, stamp in enumerate(entries.column(0))
                if (stamp >> 8 != start + place or stamp & 3)
                and not self._is_complete(entries[place], start + place, lasting)
            ]
            if odd:
                entries.complete = sorted(set(entries.complete).difference(odd))
            new.append(entries)
        self._next = begun
        return new, lasting

    def _slices(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        while first < end:
            until = min(end, (first // self._capacity + 1) * self._capacity)
            yield first, until
            first = until

    def _is_complete(self, entry: tuple[int, ...], index: int, lasting: list[tuple[int, ...]]) -> bool:
        """Returns whether this is the entry of that index and complete; otherwise notes whether to come back for it."""
        stamp, owner = entry[0], entry[0] >> 8
        if stamp == 0 or (owner < index and stamp & 3 == 0):
            self._lasting.add(index)  # it is about to be written
        elif owner != index:
            self._lasting.discard(index)  # a newer entry has this place, or an older one that lasts was left in it
        elif stamp & 3 == 0:
            self._lasting.discard(index)
            return True
        else:
            self._lasting.add(index)
            if stamp & 3 == layout.OPEN:
                lasting.append(entry)
        return False


_KNOWN_CALLS, _KNOWN_EVENTS = 512, 2048  # how far back a follower looks that comes late or was too slow
_STEPS_OPEN = 32
_SEQUENCE, _COUNT_OF, _OUTCOME, _IS_ASYNC, _ARRIVED, _STARTED, _ENDED, _COMPLETE = 6, 7, 10, 11, 13, 14, 15, 23
_SHM_WORD, _TCP_WORD, _CALLS_STEP_WORD, _PREDICTED_WORD = 8, 9, 11, 15  # of an entry, counted in words of 8 bytes
_KIND_WORD, _EVENTS_STEP_WORD = 1, 7
_LOW = (1 << 32) - 1
_DOUBLE = struct.Struct("<d")
_INTEGER = struct.Struct("<q")
_COUNT = struct.Struct("<Q")
_HEAD_NBYTES = layout.PROGRESS_AT + layout.PROGRESS.size
_VALUE, _STEP, _BUCKET = int(EventKind.VALUE), int(EventKind.STEP), int(EventKind.BUCKET)  # ints compare faster
_MARKS = frozenset({int(EventKind.VIEW_CHANGE), int(EventKind.CHECKPOINT)})


@dataclass(frozen=True)
class OpenCall:
    """A call that a rank has made and that is not over."""

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
    """What is new in a recording; times are seconds of CLOCK_MONOTONIC on its host.

    Attributes:
        step: the step that the process is in, None before the first.
        heard_s: when it recorded something last.
        steps: the steps that have ended, in order.
        values: what was logged, as (step, name, value).
        marks: other events that have ended.
        open_calls: the calls that are not over, the oldest first.
        open_kinds: the kinds of the events that last.
        shm_nbytes: what calls that have ended sent through shared memory; `tcp_nbytes`: over the network.
        links: the connections to ranks on other hosts, as they were measured last.
        calls: those that have ended well and were predicted, one entry for each kind.
    """

    step: int | None = None
    heard_s: float = 0.0
    is_ended: bool = False
    steps: list[RankStep] = field(default_factory=list)
    values: list[tuple[int, str, float]] = field(default_factory=list)
    marks: list[StandaloneEvent] = field(default_factory=list)
    open_calls: list[OpenCall] = field(default_factory=list)
    open_kinds: set[EventKind] = field(default_factory=set)
    shm_nbytes: int = 0
    tcp_nbytes: int = 0
    links: list[LinkRecord] = field(default_factory=list)
    calls: list[CallTally] = field(default_factory=list)


class RecordingFollower:
    """Reads one recording again and again through `read`; one that `is_whole` from its beginning, as a report does.

    `shift_s` is added to all times.
    """

    def __init__(self, read: ReadAt, is_whole: bool = False, shift_s: float = 0.0) -> None:
        self._read = read
        self._shift_s = shift_s
        self._places: list[tuple[int, int]] = []  # offset and capacity of pairs, names, groups, calls, events
        self._names: dict[int, str] = {}
        self._origin = (0, 0.0, 1e-9)  # a tick, its second, and the seconds of a tick
        self._calls = Table(layout.CALL, None if is_whole else _KNOWN_CALLS)
        self._events = Table(layout.EVENT, None if is_whole else _KNOWN_EVENTS)
        self._pieces: dict[int, Pieces] = {}
        self._samples = 0  # the number of the name under which samples are counted, once it is known
        self._counts: dict[str, int] = {}  # of the values of each name, in a program without steps
        self.rank: int | None = None
        self.pid = 0
        self.host = ""

    @classmethod
    def of_descriptor(cls, fd: int) -> RecordingFollower:
        """Follows the recording behind a descriptor, which remains the caller's."""
        return cls(lambda offset, nbytes: os.pread(fd, nbytes, offset))

    def news(self, stride: int = 1) -> RecordingUpdate | None:
        """Returns what is new; None while the process has not begun to record.

        Args:
            stride: of the steps, only those whose number is a multiple are worked out, so that many ranks that make
                many steps a second cost little.
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
        news = RecordingUpdate(
            step=step or None, heard_s=self._time(tick), is_ended=bool(fields[18] & layout.ENDED_FLAG)
        )
        self._take_calls(_COUNT.unpack_from(head, layout.CALLS_BEGUN_AT)[0], stride, news)
        if fields[19]:
            self._take_links(head, fields[19], news)
        self._take_events(_COUNT.unpack_from(head, layout.EVENTS_BEGUN_AT)[0], stride, news)
        for old in [each for each in self._pieces if each < (step or 0) - _STEPS_OPEN]:
            del self._pieces[old]
        return news

    def _begin(self, fields: tuple[int, ...]) -> None:
        """Reads what does not change in the recording of a process."""
        self.pid = fields[14]
        self._places = list(zip(fields[4:14:2], fields[5:14:2], strict=True))
        self.host = self._text(layout.HOST_AT, layout.HOST_NBYTES)
        self._names.clear()
        self._samples = 0
        self._pieces.clear()
        self._calls.place(*self._places[3])
        self._events.place(*self._places[4])

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

    def _take_calls(self, begun: int, stride: int, news: RecordingUpdate) -> None:
        new, lasting = self._calls.take(self._read, begun)
        took: dict[tuple[int, ...], tuple[int, float, float]] = {}
        words = (_SHM_WORD, _TCP_WORD, _CALLS_STEP_WORD, _PREDICTED_WORD)
        for entries in new:
            shm, tcp, steps, predicted = (entries.column(word) for word in words)
            for place in entries.complete:
                news.shm_nbytes += shm[place]
                news.tcp_nbytes += tcp[place]
                step, predicted_s = steps[place] & _LOW, predicted[place] / 1e9
                is_of_step = bool(step and not step % stride)
                if not is_of_step and not predicted_s:
                    continue
                entry = entries[place]
                call = self._past_call(entry, predicted_s)
                if is_of_step:
                    self._pieces.setdefault(step, Pieces()).calls.append(call)
                if predicted_s and not entry[_OUTCOME]:
                    kind = (entry[2], entry[3], entry[_COUNT_OF], entry[5])
                    calls, seconds, _ = took.get(kind, (0, 0.0, 0.0))
                    took[kind] = calls + 1, seconds + call.end_s - call.begin_s, predicted_s
        news.calls = [_tally(kind, *each) for kind, each in took.items()]
        for entry in lasting:
            operation, dtype = OPERATIONS.get(entry[2], "a call"), DTYPES[entry[3]] if entry[3] < len(DTYPES) else ""
            arrived_s = self._time(entry[_ARRIVED])
            numbers = (entry[_COUNT_OF], entry[_SEQUENCE])
            news.open_calls.append(OpenCall(operation, dtype, *numbers, arrived_s, bool(entry[_IS_ASYNC])))

    def _past_call(self, entry: tuple[int, ...], predicted_s: float) -> PastCall:
        is_async = bool(entry[_IS_ASYNC])
        start = entry[_STARTED] or entry[_ARRIVED] if is_async else entry[_ARRIVED]
        complete_s = self._time(entry[_COMPLETE]) if entry[_COMPLETE] else 0.0
        return PastCall(self._time(start), complete_s, self._time(entry[_ENDED]), is_async, predicted_s)

    def _take_events(self, begun: int, stride: int, news: RecordingUpdate) -> None:
        ended: list[tuple[int, float, float]] = []
        new, lasting = self._events.take(self._read, begun)
        news.open_kinds = {EventKind(entry[1]) for entry in lasting}
        for entry in self._wanted(new, stride):
            _, kind, name, start, end, first, second, sent, step, _ = entry
            if kind == _VALUE:
                value = _DOUBLE.unpack(_INTEGER.pack(first))[0]
                text = self._name(name)
                if text == SAMPLES:
                    self._samples = name
                    self._pieces.setdefault(step, Pieces()).samples += value
                else:
                    if not step:  # the program makes no steps, so its values are counted
                        step = self._counts[text] = self._counts.get(text, 0) + 1
                    news.values.append((step, text, value))
            elif kind == _STEP:
                ended.append((first, self._time(start), self._time(end)))
            elif kind == _BUCKET:
                began_s = self._time(start)
                sent_s = self._time(sent) if sent else began_s
                bucket = BucketTiming(began_s, sent_s, self._time(end), second)
                self._pieces.setdefault(step, Pieces()).buckets.append(bucket)
            elif kind in _MARKS:
                mark = StandaloneEvent(EventKind(kind), self._name(name), self._time(start), self._time(end))
                news.marks.append(mark)
            else:
                self._pieces.setdefault(step, Pieces()).add(kind, self._time(start), self._time(end))
        for number, begin_s, end_s in sorted(ended):
            news.steps.append(self._pieces.pop(number, Pieces()).step(number, begin_s, end_s))

    def _wanted(self, new: Sequence[Entries], stride: int) -> Iterator[tuple[int, ...]]:
        """Yields the events that are worth taking apart.

        They are those of every `stride`-th step, and of the others the values, but for those that only count samples,
        and what belongs to no step.
        """
        for entries in new:
            kinds, steps = entries.column(_KIND_WORD), entries.column(_EVENTS_STEP_WORD)
            for place in entries.complete:
                step, kind = steps[place] & _LOW, kinds[place] & _LOW
                is_of_it = step and not step % stride
                if is_of_it or kind in _MARKS or (kind == _VALUE and kinds[place] >> 32 != self._samples):
                    yield entries[place]

    def _take_links(self, head: bytes, used: int, news: RecordingUpdate) -> None:
        offset, capacity = layout.LINKS_PLACE.unpack_from(head, layout.LINKS_PLACE_AT)
        data = self._read(offset, min(used, capacity) * layout.LINK.size)
        for entry in layout.LINK.iter_unpack(data):
            if entry[0] and layout.state_of(entry[0]) != layout.WRITING:
                news.links.append(link_of(entry, lambda tick: round(self._time(tick) * 1e9)))

    def _name(self, number: int) -> str:
        if not number:
            return ""
        if number not in self._names:
            offset = self._places[1][0] + (number - 1) * layout.NAME_NBYTES
            self._names[number] = self._text(offset, layout.NAME_NBYTES)
        return self._names[number]

    def _text(self, offset: int, nbytes: int) -> str:
        return self._read(offset, nbytes).split(b"\0", 1)[0].decode(errors="replace")


def _tally(kind: tuple[int, ...], calls: int, took_s: float, predicted_s: float) -> CallTally:
    operation, dtype, count, algorithm = kind
    name = DTYPES[dtype] if dtype < len(DTYPES) else ""
    return CallTally(
        OPERATIONS.get(operation, "a call"), name, count, name_of(algorithm) or "", calls, took_s, predicted_s
    )
