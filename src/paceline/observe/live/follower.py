"""Follows one rank's recording while it grows, by reading only what is new.

`observe/reading.py` reads a whole recording, which takes tens of milliseconds; the page looks at 64 ranks every
second. An entry's place is its index modulo the table's size (native/record/recorder.cpp), hence the new ones are one
or two slices. Only complete entries are taken, which no longer change: one that is still open, such as the step in
progress, is looked at again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.observe.link_entries import link_of
from paceline.observe.live.rank_steps import SAMPLES, PastCall, Pieces
from paceline.observe.live.sample import Bucket, CallTally, RankStep
from paceline.observe.live.table import Entries, ReadAt, Table
from paceline.observe.recording import Link
from paceline.record import layout
from paceline.record.names import DTYPES, OPERATIONS, EventKind
from paceline.schedule.registry import name_of

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
class Mark:
    """An event that belongs to no step, such as a checkpoint."""

    kind: EventKind
    name: str
    start_s: float
    end_s: float


@dataclass
class News:
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
    marks: list[Mark] = field(default_factory=list)
    open_calls: list[OpenCall] = field(default_factory=list)
    open_kinds: set[EventKind] = field(default_factory=set)
    shm_nbytes: int = 0
    tcp_nbytes: int = 0
    links: list[Link] = field(default_factory=list)
    calls: list[CallTally] = field(default_factory=list)


class Follower:
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
    def of_descriptor(cls, fd: int) -> Follower:
        """Follows the recording behind a descriptor, which remains the caller's."""
        return cls(lambda offset, nbytes: os.pread(fd, nbytes, offset))

    def news(self, stride: int = 1) -> News | None:
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
        news = News(step=step or None, heard_s=self._time(tick), is_ended=bool(fields[18] & layout.ENDED_FLAG))
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

    def _take_calls(self, begun: int, stride: int, news: News) -> None:
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

    def _take_events(self, begun: int, stride: int, news: News) -> None:
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
                bucket = Bucket(began_s, sent_s, self._time(end), second)
                self._pieces.setdefault(step, Pieces()).buckets.append(bucket)
            elif kind in _MARKS:
                mark = Mark(EventKind(kind), self._name(name), self._time(start), self._time(end))
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

    def _take_links(self, head: bytes, used: int, news: News) -> None:
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
