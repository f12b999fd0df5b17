"""Reads recordings: of processes that run, through their memory's descriptor, and of files that were written out.

Turns a process's recording into what a diagnosis needs of its rank.

Reads the latest part of a recording quickly, for a launcher that has many to look at.

A whole recording has 20,000 entries, and to take one apart takes Python some microseconds. The entries that are not
wanted are crossed out in the copy first, by their stamps.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.record import layout
from paceline.comm.record.layout import DTYPES, OPERATIONS, OUTCOMES, RECEIVE, REDUCTIONS, SEND, EventKind
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    GroupMembership,
    PeerTraffic,
    RankCall,
    RankState,
    StackLocation,
)
from paceline.operate.diagnosis.recording import (
    CallRecord,
    CallStatus,
    Clock,
    EventRecord,
    GroupRecord,
    Pair,
    ProcessRecording,
    link_of,
)
from paceline.operate.diagnosis.recording import CallRecord as Recorded
from paceline.operate.diagnosis.runs import JOB_FILE, JobRun, read_run

MOST_CALLS = 1024  # of each rank; so many tell the period of a training loop
_NS = 1e-9


def rank_state_of(recording: ProcessRecording, number: int | None = None) -> RankState:
    """Returns what a recording says of its rank, on the clock of its host.

    Args:
        recording: of one process.
        number: the rank's number in the job; by default the one that the recording has.
    """
    groups = {serial: f"{group.identity:x}" for serial, group in recording.groups.items()}
    early, late = recording.calls[:-MOST_CALLS], recording.calls[-MOST_CALLS:]
    kept = [*(call for call in early if not call.is_over), *late]
    calls = tuple(_call(each, groups) for each in kept if each.group in groups)
    return RankState(
        rank=number if number is not None else recording.rank if recording.rank is not None else -1,
        host=recording.host,
        pid=recording.pid,
        seats={
            groups[serial]: GroupMembership(group.rank, group.size, _name(group, recording))
            for serial, group in recording.groups.items()
        },
        calls=calls,
        step=recording.step or None,
        since_s=_since_s(recording),
        place=_stack_location(recording.open_events()),
        data_s=sum(
            event.end_ns - event.start_ns
            for event in recording.events
            if event.kind is EventKind.DATA_WAIT and event.end_ns is not None
        )
        * _NS,
        links=_links(recording),
    )


def _name(group: GroupRecord, recording: ProcessRecording) -> str:
    """Returns the group's name, with its number among those of the same name."""
    alike = sorted(each.serial for each in recording.groups.values() if each.name == group.name)
    name = group.name if group.name.startswith("group") else f"group {group.name}"
    return f"{name} (no. {alike.index(group.serial) + 1} of {len(alike)})" if len(alike) > 1 else name


def _call(call: Recorded, groups: dict[int, str]) -> RankCall:
    is_message = call.tag is not None
    return RankCall(
        group=groups[call.group],
        sequence=call.sequence,
        header=CallSignature(
            call.operation,
            call.dtype if call.operation != "barrier" else "",
            call.count,
            (call.reduction or "").upper(),
            -1 if is_message or call.root is None else call.root,
            call.root if is_message and call.root is not None else -1,
        ),
        arrived_s=call.arrived_ns * _NS,
        ended_s=None if call.ended_ns is None else call.ended_ns * _NS,
        outcome=call.outcome or "",
        step=call.step or None,
        come_s=None if call.complete_ns is None else call.complete_ns * _NS,
        missing=call.missing,
        tcp_nbytes=call.tcp_nbytes,
    )


def _links(recording: ProcessRecording) -> tuple[PeerTraffic, ...]:
    """Returns the links by the other rank, with the connections of all groups together."""
    found: dict[int, PeerTraffic] = {}
    for link in recording.links:
        known = found.get(link.peer, PeerTraffic(link.peer, 0, 0.0))
        found[link.peer] = PeerTraffic(
            peer=link.peer,
            sent_nbytes=known.sent_nbytes + link.sent_nbytes,
            active_s=known.active_s + max(0.0, link.busy_s - link.held_s),
            segments=known.segments + link.segments,
            retransmits=known.retransmits + link.retransmits,
            round_trip_s=max(known.round_trip_s, link.round_trip_s),
            silent_s=max(known.silent_s, link.silent_s),
        )
    return tuple(found.values())


def _since_s(recording: ProcessRecording) -> float | None:
    """Returns when the rank last ended a call or an event that is not over, or began to record."""
    ends = [call.ended_ns for call in recording.calls if call.ended_ns is not None]
    begun = [event.start_ns for event in recording.open_events() if event.kind in _WAITS]
    known = [*ends, *begun] or [recording.started_ns]
    return max(known) * _NS


_WAITS = (EventKind.DATA_WAIT, EventKind.CHECKPOINT)


def _stack_location(events: Sequence[EventRecord]) -> StackLocation | None:
    """Returns where the rank said that it is, for when its stack is not known."""
    for event in reversed(events):
        if event.kind is EventKind.DATA_WAIT:
            return StackLocation(event.name or "a data loader", is_loader=True)
        if event.kind is EventKind.CHECKPOINT:
            return StackLocation(f"checkpoint {event.name or ''}".strip())
        if event.kind is EventKind.SPAN and event.name:
            return StackLocation(f'span "{event.name}"')
    return None


SUFFIX = ".record"

_MAGIC = layout.MAGIC.to_bytes(8, "little")
_STATES = tuple(CallStatus)
_DOUBLE = struct.Struct("<d")


class NoRecordingError(ValueError):
    """A file holds no recording, or one of another version."""


def read(path: str | os.PathLike[str]) -> ProcessRecording:
    """Returns the recording in a file.

    Raises:
        NoRecordingError: there is none in it.
        OSError: the file cannot be read.
    """
    return parse(memory_of(path), str(path))


def memory_of(path: str | os.PathLike[str]) -> bytes:
    """Returns the memory that a file holds, for those who read a part of it only.

    Raises:
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_MAGIC):  # the launcher compresses what it writes out
        with contextlib.suppress(zlib.error):
            data = zlib.decompress(data)
    return data


def read_live(fd: int, source: str = "") -> ProcessRecording:
    """Returns what a process has recorded so far, through a descriptor of its memory, while it goes on recording.

    Raises:
        NoRecordingError: the process has not begun to record.
        OSError: the descriptor cannot be read.
    """
    from paceline import _core

    return parse(_core.snapshot_recording(fd), source or f"descriptor {fd}")


def read_directory(directory: str | os.PathLike[str]) -> list[ProcessRecording]:
    """Returns the recordings of a job's directory by rank, without those that cannot be read."""
    found = []
    for path in sorted(Path(directory).rglob(f"*{SUFFIX}")):
        try:
            found.append(read(path))
        except (NoRecordingError, OSError):
            continue
    return sorted(found, key=lambda each: (each.rank is None, each.rank, each.started_ns))


def read_aligned(directories: Sequence[str | os.PathLike[str]]) -> tuple[list[ProcessRecording], int | None]:
    """Returns the recordings of one job by rank, from the directories of all its machines, on one clock.

    It is the clock of the machine where the job's machines met. The second value is the largest error of any
    recording's times on it, in nanoseconds. It is None if a launcher did not say how its clock differs: then the
    recordings are aligned by the time of day that their hosts had, which may be off by any amount.
    """
    found = [each for directory in directories for each in read_directory(directory)]
    found.sort(key=lambda each: (each.rank is None, each.rank, each.started_ns))
    places = [RecordingSource(each.clock, each.host, Path(each.source)) for each in found]
    shifts, error_ns = shifts_of(places, machines_in(directories))
    return [each.shifted(shift) if shift else each for each, shift in zip(found, shifts, strict=True)], error_ns


@dataclass(frozen=True)
class RecordingSource:
    """Where a recording was made, and the file that holds it."""

    clock: Clock
    host: str
    path: Path


def machines_in(directories: Sequence[str | os.PathLike[str]]) -> list[JobRun]:
    """Returns what the launchers of all machines wrote down, in these directories or below."""
    paths = [path.parent for directory in directories for path in sorted(Path(directory).rglob(JOB_FILE))]
    return [run for path in dict.fromkeys(paths) if (run := read_run(path)) is not None]


def shifts_of(places: Sequence[RecordingSource], machines: Sequence[JobRun]) -> tuple[list[int], int | None]:
    """Returns what is added to the times of recordings to put them on one clock, and the largest error of that.

    Where a launcher did not say how its clock differs, the time of day counts for all, and the error is None.
    """
    if len({place.clock.identity for place in places}) <= 1:
        return [0] * len(places), 0
    offsets = {place.clock.identity: offset for place in places if (offset := _offset(place, machines)) is not None}
    if any(place.clock.identity not in offsets for place in places):
        return [place.clock.day_ns - places[0].clock.day_ns for place in places], None
    shifts = [offsets[place.clock.identity].offset_ns for place in places]
    return shifts, max(offset.error_ns for offset in offsets.values())


def _offset(place: RecordingSource, machines: Sequence[JobRun]) -> Offset | None:
    """Returns the offset that the launcher of this recording wrote down; several may have written into one place."""
    return next(
        (run.clock for run in machines if place.path.is_relative_to(run.directory) and run.host == place.host), None
    )


def place_of(data: bytes, path: Path) -> RecordingSource:
    """Returns where the recording in `data` was made, which was read from `path`; quicker than `parse`.

    Raises:
        NoRecordingError: there is none in it.
    """
    return RecordingSource(*_Parser(data, str(path)).clock_and_host(), path)


def parse(data: bytes | bytearray, source: str = "memory", *, has_algorithms: bool = True) -> ProcessRecording:
    """Returns the recording in `data`, a copy of its memory.

    Args:
        data: the copy.
        source: what it is called in errors.
        has_algorithms: whether the algorithms of the calls are wanted. To know their names takes a long import.

    Raises:
        NoRecordingError: there is none in it.
    """
    return _Parser(data, source, has_algorithms).recording()


def stamps_in(data: bytes | bytearray, offset: int, capacity: int, nbytes: int) -> list[int]:
    """Returns the first word of each entry of a table, all at once: most of 20,000 entries are often empty."""
    words = memoryview(data)[offset : offset + capacity * nbytes].cast("Q")
    return words[:: nbytes // layout.WORD_NBYTES].tolist()


def _algorithm_names() -> Callable[[int], str | None]:
    from paceline.comm.schedule.registry import name_of

    return name_of


def _no_name(_: int) -> None:
    return None


class _Parser:
    """One copy of a recording's memory, taken apart."""

    def __init__(self, data: bytes | bytearray, source: str, has_algorithms: bool = True) -> None:
        self._data = data
        self._name_of = _algorithm_names() if has_algorithms else _no_name
        self._source = source
        self._torn = 0
        if len(data) < layout.HEADER.size or not data.startswith(_MAGIC):
            raise NoRecordingError(f"{source} holds no recording of Paceline: it does not begin with its magic number")
        header = layout.HEADER.unpack_from(data)
        (_, version, _, self._nbytes, *places) = header[:14]
        self._pid, self._rank, self._size, _, self._flags, links_used, hertz, time_namespace, _, names = header[14:]
        if version != layout.VERSION or len(data) < self._nbytes:
            raise NoRecordingError(
                f"{source} holds a recording of version {version} with {len(data)} bytes; this Paceline reads version "
                f"{layout.VERSION} with {layout.NBYTES}"
            )
        links_at, capacity = layout.LINKS_PLACE.unpack_from(data, layout.LINKS_PLACE_AT)
        self._places = [*zip(places[::2], places[1::2], strict=True), (links_at, min(links_used, capacity))]
        self._names = [
            self._text(self._places[1][0] + at * layout.NAME_NBYTES, layout.NAME_NBYTES) for at in range(names)
        ]
        boot = self._text(layout.BOOT_AT, layout.BOOT_NBYTES)
        pairs = sorted(entry[1:] for entry in self._entries(0, layout.PAIR, layout.PAIR.size))
        self._clock = Clock(f"{boot}/{time_namespace}", hertz, tuple(Pair(*each) for each in pairs))

    def clock_and_host(self) -> tuple[Clock, str]:
        """Returns the clock of its times, and where it was recorded."""
        return self._clock, self._text(layout.HOST_AT, layout.HOST_NBYTES)

    def recording(self) -> ProcessRecording:
        """Returns everything."""
        tick, step = layout.PROGRESS.unpack_from(self._data, layout.PROGRESS_AT)
        groups = [self._group(entry, at) for entry, at in self._placed(2, layout.GROUP, layout.GROUP_NBYTES)]
        calls = [self._call(entry) for entry in self._entries(3, layout.CALL, layout.CALL.size)]
        events = [self._event(entry) for entry in self._entries(4, layout.EVENT, layout.EVENT.size)]
        links = [link_of(entry, self._time_ns) for entry in self._entries(5, layout.LINK, layout.LINK.size)]
        return ProcessRecording(
            source=self._source,
            pid=self._pid,
            rank=self._rank if self._rank >= 0 else None,
            world_size=self._size if self._size > 0 else None,
            worker=self._text(layout.WORKER_AT, layout.WORKER_NBYTES),
            host=self._text(layout.HOST_AT, layout.HOST_NBYTES),
            is_ended=bool(self._flags & layout.ENDED_FLAG),
            step=step,
            written_ns=self._clock.monotonic_ns(tick),
            clock=self._clock,
            groups={group.serial: group for group in groups},
            calls=tuple(sorted(calls, key=lambda call: call.index)),
            events=tuple(sorted(events, key=lambda event: event.index)),
            links=tuple(sorted(links, key=lambda link: (link.peer, link.group))),
            torn=self._torn,
        )

    def _placed(self, table: int, entry: struct.Struct, nbytes: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yields the whole entries of a table, each with its offset."""
        offset, capacity = self._places[table]
        for number, stamp in enumerate(stamps_in(self._data, offset, capacity, nbytes)):
            if stamp and layout.state_of(stamp) == layout.WRITING:
                self._torn += 1
            elif stamp:
                at = offset + number * nbytes
                yield entry.unpack_from(self._data, at), at

    def _entries(self, table: int, entry: struct.Struct, nbytes: int) -> Iterator[tuple[int, ...]]:
        return (fields for fields, _ in self._placed(table, entry, nbytes))

    def _group(self, fields: tuple[int, ...], at: int) -> GroupRecord:
        _, serial, size, rank, name, identity, listed, engine, opened, closed, _ = fields
        ranks = struct.unpack_from(f"<{listed}H", self._data, at + layout.GROUP.size)
        return GroupRecord(
            serial=serial,
            name=self._name(name) or "",
            identity=identity,
            engine=self._name(engine) or "",
            size=size,
            rank=rank,
            ranks=ranks,
            opened_ns=self._clock.monotonic_ns(opened),
            closed_ns=self._clock.monotonic_ns(closed),
        )

    def _call(self, fields: tuple[int, ...]) -> CallRecord:
        (stamp, group, operation, dtype, reduction, algorithm, sequence, count, root, state, outcome, is_async) = (
            fields[:12]
        )
        (_, arrived, started, ended, shm, tcp, last, first, step, thread, tag, complete, missing, predicted_ns) = (
            fields[12:]
        )
        time_of = self._clock.monotonic_ns
        return CallRecord(
            index=layout.index_of(stamp),
            group=group,
            sequence=sequence,
            operation=OPERATIONS.get(operation, f"operation {operation}"),
            dtype=DTYPES[dtype] if dtype < len(DTYPES) else f"type {dtype}",
            count=count,
            root=root if root >= 0 else None,
            reduction=REDUCTIONS[reduction] if reduction < len(REDUCTIONS) else None,
            algorithm=self._name_of(algorithm),
            state=_STATES[state % len(_STATES)],
            outcome=OUTCOMES.get(outcome, f"code {outcome}") if ended else None,
            is_async=bool(is_async),
            arrived_ns=time_of(arrived) or 0,
            started_ns=time_of(started),
            complete_ns=time_of(complete),
            ended_ns=time_of(ended),
            last_arrived=last if last >= 0 else None,
            missing=tuple(first + place for place in range(missing.bit_length()) if missing >> place & 1),
            shm_nbytes=shm,
            tcp_nbytes=tcp,
            step=step,
            thread=thread,
            tag=tag if operation in (SEND, RECEIVE) else None,
            predicted_s=predicted_ns / 1e9 if predicted_ns else None,
        )

    def _event(self, fields: tuple[int, ...]) -> EventRecord:
        stamp, kind, name, start, end, first, second, sent, step, thread = fields
        is_value = kind == EventKind.VALUE
        return EventRecord(
            index=layout.index_of(stamp),
            kind=EventKind(kind),
            name=self._name(name),
            start_ns=self._clock.monotonic_ns(start) or 0,
            end_ns=self._clock.monotonic_ns(end),
            sent_ns=self._clock.monotonic_ns(sent),
            first=0 if is_value else first,
            second=second,
            value=_DOUBLE.unpack(first.to_bytes(8, "little", signed=True))[0] if is_value else None,
            step=step,
            thread=thread,
        )

    def _time_ns(self, tick: int) -> int:
        return self._clock.monotonic_ns(tick) or 0

    def _name(self, number: int) -> str | None:
        return self._names[number - 1] if 0 < number <= len(self._names) else None

    def _text(self, at: int, nbytes: int) -> str:
        return self._data[at : at + nbytes].split(b"\0", 1)[0].decode(errors="replace")


MOST_EVENTS = 1024
_CALLS, _EVENTS = 3, 4  # the tables' numbers in the header


def read_latest(fd: int, most_calls: int = MOST_CALLS, most_events: int = MOST_EVENTS) -> ProcessRecording:
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
        stamp & 3 == layout.OPEN for stamp in stamps_in(data, *_table_location(data, _CALLS), layout.CALL.size)
    )


def _snapshot(fd: int) -> bytearray:
    """Returns a copy of the memory; an empty one if it holds no recording."""
    from paceline import _core

    data = bytearray(_core.snapshot_recording(fd))
    is_one = len(data) >= layout.HEADER.size and data.startswith(layout.MAGIC.to_bytes(layout.WORD_NBYTES, "little"))
    return data if is_one else bytearray()


def _table_location(data: bytearray, table: int) -> tuple[int, int]:
    """Returns where a table is and how many entries it has."""
    places = layout.HEADER.unpack_from(data)[4:14]
    return places[2 * table], places[2 * table + 1]


def _cross_out(data: bytearray, table: int, nbytes: int, most: int) -> None:
    offset, capacity = _table_location(data, table)
    stamps = stamps_in(data, offset, capacity, nbytes)
    oldest = layout.first_stamp(layout.index_of(max(stamps, default=0)) - most + 1)  # of those that stay
    for at, stamp in enumerate(stamps):
        if stamp and stamp < oldest and layout.state_of(stamp) != layout.OPEN:
            data[offset + at * nbytes : offset + at * nbytes + layout.WORD_NBYTES] = bytes(layout.WORD_NBYTES)
