"""Reads recordings from files, and from running processes through a descriptor for their memory.

A full recording contains 20,000 entries, and unpacking each entry in Python takes a few microseconds. A launcher with
many workers therefore uses `read_latest`, which uses the entries' stamps to discard older entries before unpacking.
`rank_state_of` converts a recording to the data that a diagnosis uses.
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
from paceline.comm.record.recorder import SUFFIX
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    DevicePhase,
    GroupMembership,
    PeerTraffic,
    RankCall,
    RankState,
    StackLocation,
    StoreWait,
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
from paceline.operate.diagnosis.runs import JOB_FILE, JobRun, files_of_job, read_run

MOST_CALLS = 1024  # maximum number of calls per rank, sufficient to detect the period of a training loop
MOST_EVENTS = 1024

_MAGIC = layout.MAGIC.to_bytes(8, "little")
_STATES = tuple(CallStatus)
_DOUBLE = struct.Struct("<d")
_NAMES, _GROUPS, _CALLS, _EVENTS, _LINKS = 1, 2, 3, 4, 5  # table numbers; table 0 contains clock pairs
_WAITS = (EventKind.DATA_WAIT, EventKind.CHECKPOINT, EventKind.STORE_WAIT)
_FORMATION = OPERATIONS[layout.FORMATION]
_NS = 1e-9


class NoRecordingError(ValueError):
    """Raised if a file does not contain a recording, or contains one in an unsupported format version."""


def read(path: str | os.PathLike[str]) -> ProcessRecording:
    """Reads a recording from a file.

    Raises:
        NoRecordingError: the file does not contain a recording.
        OSError: the file cannot be read.
    """
    return parse(memory_of(path), str(path))


def memory_of(path: str | os.PathLike[str]) -> bytes:
    """Reads a file and returns the recorded memory, decompressed but not parsed.

    Raises:
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_MAGIC):  # recordings saved by the launcher are compressed
        with contextlib.suppress(zlib.error):
            data = zlib.decompress(data)
    return data


def read_live(fd: int, source: str = "") -> ProcessRecording:
    """Reads the recording of a running process through a descriptor for its memory.

    Args:
        fd: the descriptor of the recording's memory.
        source: the name of the recording in error messages.

    Raises:
        NoRecordingError: the process has not begun to record.
        OSError: the descriptor cannot be read.
    """
    from paceline import _core

    return parse(_core.snapshot_recording(fd), source or f"descriptor {fd}")


def read_latest(fd: int, most_calls: int = MOST_CALLS, most_events: int = MOST_EVENTS) -> ProcessRecording:
    """Reads a running process's latest calls and events, and all earlier calls and events that have not ended.

    The names of the calls' algorithms are not read.

    Raises:
        NoRecordingError: the process has not begun to record.
        OSError: the descriptor cannot be read.
    """
    data = _snapshot(fd)
    if data:
        _clear_old(data, _CALLS, layout.CALL.size, most_calls)
        _clear_old(data, _EVENTS, layout.EVENT.size, most_events)
    return parse(data, f"descriptor {fd}", has_algorithms=False)


def has_open_waits(fd: int) -> bool:
    """Returns True if a running process is in a call or waits for a store. This check is cheap."""
    try:
        data = _snapshot(fd)
    except OSError:
        return False
    return bool(data) and (
        next(_open_entries(data, _CALLS, layout.CALL.size), None) is not None
        or any(
            layout.EVENT.unpack_from(data, start)[1] == EventKind.STORE_WAIT
            for start in _open_entries(data, _EVENTS, layout.EVENT.size)
        )
    )


def _open_entries(data: bytearray, table: int, nbytes: int) -> Iterator[int]:
    """Yields the offsets of a table's open entries."""
    offset, capacity = _table_location(data, table)
    for index, stamp in enumerate(_stamps_in(data, offset, capacity, nbytes)):
        if layout.state_of(stamp) == layout.OPEN:
            yield offset + index * nbytes


def _snapshot(fd: int) -> bytearray:
    """Copies the memory; the copy is empty if the memory does not contain a recording."""
    from paceline import _core

    data = bytearray(_core.snapshot_recording(fd))
    return data if len(data) >= layout.HEADER.size and data.startswith(_MAGIC) else bytearray()


def _table_location(data: bytearray, table: int) -> tuple[int, int]:
    """Returns the offset and the number of entries of a table."""
    places = layout.HEADER.unpack_from(data)[4:14]
    return places[2 * table], places[2 * table + 1]


def _clear_old(data: bytearray, table: int, nbytes: int, most: int) -> None:
    """Clears the stamps of all entries in a table except the latest `most` and those that have not ended."""
    offset, capacity = _table_location(data, table)
    stamps = _stamps_in(data, offset, capacity, nbytes)
    oldest_kept = layout.first_stamp(layout.index_of(max(stamps, default=0)) - most + 1)
    for index, stamp in enumerate(stamps):
        if stamp and stamp < oldest_kept and layout.state_of(stamp) != layout.OPEN:
            start = offset + index * nbytes
            data[start : start + layout.WORD_NBYTES] = bytes(layout.WORD_NBYTES)


def read_directory(directory: str | os.PathLike[str]) -> list[ProcessRecording]:
    """Reads the recordings in a job's directory, ordered by rank; skips unreadable files."""
    found = []
    for path in files_of_job(directory, f"*{SUFFIX}"):
        with contextlib.suppress(NoRecordingError, OSError):
            found.append(read(path))
    return _by_rank(found)


def read_aligned(directories: Sequence[str | os.PathLike[str]]) -> tuple[list[ProcessRecording], int | None]:
    """Reads the recordings of one job, ordered by rank and converted to one clock.

    The clock belongs to the machine that hosted the launchers' rendezvous. The second result is the maximum error of
    the times, in nanoseconds. It is None if a launcher did not save its clock offset. In this case, the recordings are
    aligned by their hosts' time of day, whose error is unbounded.

    Args:
        directories: the job's directories on all machines.
    """
    found = _by_rank([recording for directory in directories for recording in read_directory(directory)])
    sources = [RecordingSource(recording.clock, recording.host, Path(recording.source)) for recording in found]
    shifts, error_ns = shifts_of(sources, machines_in(directories))
    aligned = [recording.shifted(shift) if shift else recording for recording, shift in zip(found, shifts, strict=True)]
    return aligned, error_ns


def _by_rank(recordings: list[ProcessRecording]) -> list[ProcessRecording]:
    return sorted(recordings, key=lambda recording: (recording.rank is None, recording.rank, recording.started_ns))


@dataclass(frozen=True)
class RecordingSource:
    """A recording's file, with the host and the clock of the recorded process."""

    clock: Clock
    host: str
    path: Path


def machines_in(directories: Sequence[str | os.PathLike[str]]) -> list[JobRun]:
    """Returns the runs that launchers recorded in these directories or their subdirectories."""
    paths = [path.parent for directory in directories for path in files_of_job(directory, JOB_FILE)]
    return [run for path in dict.fromkeys(paths) if (run := read_run(path)) is not None]


def shifts_of(sources: Sequence[RecordingSource], machines: Sequence[JobRun]) -> tuple[list[int], int | None]:
    """Returns the nanoseconds to add to each recording's times to convert them to one clock, and the maximum error.

    If a launcher did not save its clock offset, all recordings are aligned by the time of day, and the error is None.
    """
    if len({source.clock.identity for source in sources}) <= 1:
        return [0] * len(sources), 0
    offsets = {source.clock.identity: offset for source in sources if (offset := _offset(source, machines)) is not None}
    if any(source.clock.identity not in offsets for source in sources):
        return [source.clock.day_ns - sources[0].clock.day_ns for source in sources], None
    shifts = [offsets[source.clock.identity].offset_ns for source in sources]
    return shifts, max(offset.error_ns for offset in offsets.values())


def _offset(source: RecordingSource, machines: Sequence[JobRun]) -> Offset | None:
    """Returns the clock offset saved by this recording's launcher. Several launchers may share one directory."""
    return next(
        (run.clock for run in machines if source.path.is_relative_to(run.directory) and run.host == source.host), None
    )


def source_of(data: bytes, path: Path) -> RecordingSource:
    """Returns the clock and the host of the recording in `data`, without parsing all of it.

    Raises:
        NoRecordingError: `data` contains no recording.
    """
    return RecordingSource(*_Parser(data, str(path), has_algorithms=False).clock_and_host(), path)


def parse(data: bytes | bytearray, source: str = "memory", *, has_algorithms: bool = True) -> ProcessRecording:
    """Parses a recording from a copy of its memory.

    Args:
        data: the copy of the memory.
        source: the name of the recording in error messages.
        has_algorithms: whether to fill in the names of algorithms, which requires a slow import.

    Raises:
        NoRecordingError: `data` contains no recording.
    """
    return _Parser(data, source, has_algorithms).recording()


def _stamps_in(data: bytes | bytearray, offset: int, capacity: int, nbytes: int) -> list[int]:
    """Returns the first word of each entry in a table. A single bulk read is fast even if most entries are empty."""
    words = memoryview(data)[offset : offset + capacity * nbytes].cast("Q")
    return words[:: nbytes // layout.WORD_NBYTES].tolist()


def _algorithm_names() -> Callable[[int], str | None]:
    from paceline.comm.schedule.algorithms import name_of

    return name_of


class _Parser:
    """Parser for one copy of a recording's memory."""

    def __init__(self, data: bytes | bytearray, source: str, has_algorithms: bool) -> None:
        self._data = data
        self._algorithm_of = _algorithm_names() if has_algorithms else lambda _: None
        self._source = source
        self._torn = 0
        if len(data) < layout.HEADER.size or not data.startswith(_MAGIC):
            raise NoRecordingError(f"{source} is not a Paceline recording: it does not begin with the magic number")
        header = layout.HEADER.unpack_from(data)
        (_, version, _, self._nbytes, *places) = header[:14]
        self._pid, self._rank, self._size, _, self._flags, links_used, hertz, time_namespace, _, names = header[14:]
        if version != layout.VERSION or len(data) < self._nbytes:
            raise NoRecordingError(
                f"{source} contains a recording of version {version} with {len(data)} bytes; this Paceline reads "
                f"version {layout.VERSION} with {layout.NBYTES}"
            )
        links_at, capacity = layout.LINKS_PLACE.unpack_from(data, layout.LINKS_PLACE_AT)
        self._places = [*zip(places[::2], places[1::2], strict=True), (links_at, min(links_used, capacity))]
        first_name = self._places[_NAMES][0]
        self._names = [
            self._text(first_name + index * layout.NAME_NBYTES, layout.NAME_NBYTES) for index in range(names)
        ]
        boot = self._text(layout.BOOT_AT, layout.BOOT_NBYTES)
        pairs = sorted(entry[1:] for entry in self._entries(0, layout.PAIR))
        self._clock = Clock(f"{boot}/{time_namespace}", hertz, tuple(Pair(*pair) for pair in pairs))

    def clock_and_host(self) -> tuple[Clock, str]:
        return self._clock, self._text(layout.HOST_AT, layout.HOST_NBYTES)

    def recording(self) -> ProcessRecording:
        tick, step = layout.PROGRESS.unpack_from(self._data, layout.PROGRESS_AT)
        groups = [self._group(*entry) for entry in self._placed(_GROUPS, layout.GROUP, layout.GROUP_NBYTES)]
        calls = [self._call(entry) for entry in self._entries(_CALLS, layout.CALL)]
        events = [self._event(entry) for entry in self._entries(_EVENTS, layout.EVENT)]
        links = [link_of(entry, self._time_ns) for entry in self._entries(_LINKS, layout.LINK)]
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
        """Yields the complete and the open entries in a table, each with its offset."""
        offset, capacity = self._places[table]
        for index, stamp in enumerate(_stamps_in(self._data, offset, capacity, nbytes)):
            if stamp and layout.state_of(stamp) == layout.WRITING:
                self._torn += 1
            elif stamp:
                start = offset + index * nbytes
                yield entry.unpack_from(self._data, start), start

    def _entries(self, table: int, entry: struct.Struct) -> Iterator[tuple[int, ...]]:
        return (fields for fields, _ in self._placed(table, entry, entry.size))

    def _group(self, fields: tuple[int, ...], offset: int) -> GroupRecord:
        _, serial, size, rank, name, identity, listed, engine, opened, closed, _ = fields
        ranks = struct.unpack_from(f"<{listed}H", self._data, offset + layout.GROUP.size)
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
        (_, arrived, started, ended, shm, tcp, last, first, step, thread, tag, site, *rest) = fields[12:]
        complete, missing, predicted_ns = rest
        file, line = layout.site_of(site)
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
            algorithm=self._algorithm_of(algorithm),
            state=_STATES[state % len(_STATES)],
            outcome=OUTCOMES.get(outcome, f"code {outcome}") if ended else None,
            is_async=bool(is_async),
            arrived_ns=time_of(arrived) or 0,
            started_ns=time_of(started),
            complete_ns=time_of(complete),
            ended_ns=time_of(ended),
            last_arrived=last if last >= 0 else None,
            missing=tuple(first + bit for bit in range(missing.bit_length()) if missing >> bit & 1),
            shm_nbytes=shm,
            tcp_nbytes=tcp,
            step=step,
            thread=thread,
            tag=tag if operation in (SEND, RECEIVE) else None,
            predicted_s=predicted_ns / 1e9 if predicted_ns else None,
            line=f"{name}:{line}" if (name := self._name(file)) else None,
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

    def _text(self, offset: int, nbytes: int) -> str:
        return self._data[offset : offset + nbytes].split(b"\0", 1)[0].decode(errors="replace")


def rank_state_of(recording: ProcessRecording, number: int | None = None) -> RankState:
    """Converts a recording to the state of its rank, with times on its host's clock.

    Args:
        recording: the recording of one process.
        number: the rank's number in the job. Default: the number in the recording.
    """
    forming = {call.group for call in recording.calls if call.operation == _FORMATION and not call.is_over}
    groups = {serial: group.key for serial, group in recording.groups.items()}
    early, late = recording.calls[:-MOST_CALLS], recording.calls[-MOST_CALLS:]
    kept = [*(call for call in early if not call.is_over), *late]
    return RankState(
        rank=number if number is not None else recording.rank if recording.rank is not None else -1,
        host=recording.host,
        pid=recording.pid,
        memberships={
            groups[serial]: GroupMembership(
                group.rank,
                group.size,
                _group_name(group, recording),
                group.ranks if serial in forming else (),
                group.closed_ns is not None,
                tuple(group.ranks) == tuple(range(group.size)),
            )
            for serial, group in recording.groups.items()
        },
        calls=tuple(_rank_call(call, recording.groups[call.group]) for call in kept if call.group in groups),
        step=recording.step or None,
        since_s=_since_s(recording),
        place=_location(recording.open_events()),
        data_s=sum(
            event.end_ns - event.start_ns
            for event in recording.events
            if event.kind is EventKind.DATA_WAIT and event.end_ns is not None
        )
        * _NS,
        links=_traffic(recording),
        phase=_phase(recording.open_events()),
        store_wait=_store_wait(recording.open_events()),
    )


def _store_wait(events: Sequence[EventRecord]) -> StoreWait | None:
    """Returns the store wait that has not ended, or None."""
    for event in reversed(events):
        if event.kind is EventKind.STORE_WAIT:
            method, _, keys = (event.name or "wait").partition(" ")
            return StoreWait(method, keys, event.first, event.start_ns * _NS)
    return None


def _phase(events: Sequence[EventRecord]) -> DevicePhase | None:
    """Returns the latest phase that a device has begun but not ended."""
    for event in reversed(events):
        if event.kind is EventKind.DEVICE:
            return DevicePhase(event.name or "a phase", event.second or None, event.start_ns * _NS)
    return None


def _group_name(group: GroupRecord, recording: ProcessRecording) -> str:
    """Returns the group's name, with its device type and, if several groups share the name, a number."""
    alike = sorted(
        other.serial for other in recording.groups.values() if other.name == group.name and other.engine == group.engine
    )
    name = group.name if group.name.startswith("group") else f"group {group.name}"
    name += group.device and f" on {group.device}"
    return f"{name} (no. {alike.index(group.serial) + 1} of {len(alike)})" if len(alike) > 1 else name


def _rank_call(call: CallRecord, group: GroupRecord) -> RankCall:
    is_message = call.tag is not None
    device = group.device
    return RankCall(
        group=group.key,
        sequence=call.sequence,
        header=CallSignature(
            call.operation,
            call.dtype if call.operation not in ("barrier", _FORMATION) else "",
            call.count,
            (call.reduction or "").upper(),
            -1 if is_message or call.root is None else call.root,
            call.root if is_message and call.root is not None else -1,
            call.tag or 0,
        ),
        arrived_s=call.arrived_ns * _NS,
        ended_s=None if call.ended_ns is None else call.ended_ns * _NS,
        outcome=call.outcome or "",
        step=call.step or None,
        all_arrived_s=None if call.complete_ns is None else call.complete_ns * _NS,
        missing=call.missing,
        tcp_nbytes=call.tcp_nbytes,
        line=call.line or "",
        device=device,
        reached_s=call.started_ns * _NS if device and call.started_ns is not None else None,
    )


def _traffic(recording: ProcessRecording) -> tuple[PeerTraffic, ...]:
    """Returns the traffic to each other rank, summed over the connections of all groups."""
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
    """Returns the latest time at which a call ended or an open wait began, or else the recording's start time."""
    ends = [call.ended_ns for call in recording.calls if call.ended_ns is not None]
    begun = [event.start_ns for event in recording.open_events() if event.kind in _WAITS]
    known = [*ends, *begun] or [recording.started_ns]
    return max(known) * _NS


def _location(events: Sequence[EventRecord]) -> StackLocation | None:
    """Infers a rank's location from its open spans, if its stack is unknown."""
    for event in reversed(events):
        if event.kind is EventKind.DATA_WAIT:
            return StackLocation(event.name or "a data loader", is_loader=True)
        if event.kind is EventKind.CHECKPOINT:
            return StackLocation(f"checkpoint {event.name or ''}".strip())
        if event.kind is EventKind.SPAN and event.name:
            return StackLocation(f'span "{event.name}"')
    return None
