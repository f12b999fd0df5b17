"""Conversion of recordings to Chrome's JSON trace format, for Perfetto and chrome://tracing.

All ranks share one time axis. Each rank is a process in the trace, with one row for its steps, one for each thread and
each device, one for the calls in each group, and one for gradient buckets. Arrows connect sends to receives. Traces
from `torch.profiler` can be merged. Because these traces use the time of day, the time axis does as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.comm.record.layout import EventKind
from paceline.operate.diagnosis.recording import CallRecord, EventRecord, ProcessRecording

TraceEvent = dict[str, Any]

_STEPS, _BUCKETS, _CHUNKS, _FIRST_DEVICE, _FIRST_GROUP = 1, 2, 3, 4, 100  # row numbers in the trace
_FIRST_THREAD = 1000
_MESSAGES = ("send", "recv")
_Link = tuple[tuple[int, ...], int, int, int | None]


def trace_of(
    recordings: Sequence[ProcessRecording], error_ns: int | None = 0, merged: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns a trace in Chrome's JSON format.

    Args:
        recordings: the recordings of one job, on one clock.
        error_ns: the maximum clock error between recordings, in nanoseconds, for the trace's metadata; None if unknown.
        merged: parsed trace files from `torch.profiler`.
    """
    events: list[TraceEvent] = []
    day_ns = recordings[0].day_ns if recordings else 0
    processes = _numbered([recording for recording in recordings if recording.clock.pairs])
    axes = [_TraceAxis(number, recording, day_ns) for number, recording in processes.items()]
    for axis in axes:
        events += _of_process(axis)
    events += _arrows(axes)
    for trace in merged:
        events += _with_absolute_times(trace)
    first_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first_us
    metadata = {"clock error between hosts, ns": error_ns, "time of day at 0, µs": first_us}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


class _TraceAxis:
    """Converts one process's times to the time axis of the trace."""

    def __init__(self, pid: int, recording: ProcessRecording, day_ns: int) -> None:
        self.pid = pid  # number of the process in the trace
        self.recording = recording
        self._day_ns = day_ns
        self._until_ns = recording.written_ns or recording.started_ns

    def us(self, time_ns: int) -> float:
        """Converts a time to microseconds since the epoch, as measured by the first rank's clock."""
        return (time_ns + self._day_ns) / 1000

    def span(self, row: int, name: str, start_ns: int, end_ns: int | None, **facts: object) -> TraceEvent:
        """Returns a span event. A span that has not ended extends to the process's latest record."""
        end = max(start_ns, self._until_ns) if end_ns is None else end_ns
        shown = {key: value for key, value in facts.items() if value not in (None, "")}
        if end_ns is None:
            shown["has ended"] = False
        where = {"ph": "X", "pid": self.pid, "tid": row, "ts": self.us(start_ns), "dur": (end - start_ns) / 1000}
        return {"name": name, **where, "args": shown}

    def row_name(self, row: int, name: str) -> list[TraceEvent]:
        """Returns the metadata events that name a row and sort it by number."""
        common = {"ph": "M", "pid": self.pid, "tid": row}
        return [
            {"name": "thread_name", **common, "args": {"name": name}},
            {"name": "thread_sort_index", **common, "args": {"sort_index": row}},
        ]


def _numbered(recordings: Sequence[ProcessRecording]) -> dict[int, ProcessRecording]:
    """Returns the recordings keyed by rank, or by another number if several workers had the same rank."""
    numbered: dict[int, ProcessRecording] = {}
    for recording in recordings:
        number = recording.pid if recording.rank is None or recording.rank in numbered else recording.rank
        while number in numbered:
            number += 1
        numbered[number] = recording
    return numbered


def _of_process(axis: _TraceAxis) -> list[TraceEvent]:
    recording = axis.recording
    who = f"worker {recording.worker}, last rank" if recording.worker else "rank"
    title = f"{who} {recording.rank} ({recording.host}, pid {recording.pid})"
    events: list[TraceEvent] = [{"name": "process_name", "ph": "M", "pid": axis.pid, "args": {"name": title}}]
    events += axis.row_name(_STEPS, "steps") + axis.row_name(_BUCKETS, "buckets")
    if any(event.kind is EventKind.CHUNK for event in recording.events):
        events += axis.row_name(_CHUNKS, "chunks through host memory")
    for serial, group in recording.groups.items():
        events += axis.row_name(_FIRST_GROUP + serial, f"calls: {group.name}")
    for index in sorted({event.first for event in recording.events if event.kind is EventKind.DEVICE}):
        events += axis.row_name(_FIRST_DEVICE + index, f"device {index}")
    for thread in sorted({event.thread for event in recording.events if event.kind is not EventKind.DEVICE}):
        events += axis.row_name(_row_of_thread(thread), f"thread {thread}")
    for event in recording.events:
        events += _of_event(axis, event)
    for call in recording.calls:
        events += _of_call(axis, call)
    return events


def _row_of_thread(thread: int) -> int:
    return _FIRST_THREAD + thread


def _of_event(axis: _TraceAxis, event: EventRecord) -> list[TraceEvent]:
    kind = event.kind.name.lower().replace("_", " ")
    if event.kind is EventKind.VALUE:
        counter = {"ph": "C", "pid": axis.pid, "ts": axis.us(event.start_ns)}
        return [{"name": event.name or "", **counter, "args": {"value": event.value}}]
    if event.kind is EventKind.STEP:
        return [axis.span(_STEPS, f"step {event.first}", event.start_ns, event.end_ns, made_by=event.name)]
    if event.kind is EventKind.DEVICE:
        row = _FIRST_DEVICE + event.first
        return [axis.span(row, event.name or kind, event.start_ns, event.end_ns, step=event.second)]
    if event.kind in (EventKind.BUCKET, EventKind.CHUNK):  # buckets may overlap, but spans in one row must not
        row, name = (_BUCKETS, kind) if event.kind is EventKind.BUCKET else (_CHUNKS, f"{event.name} {kind}")
        common = {"name": f"{name} {event.first}", "cat": kind, "pid": axis.pid, "tid": row, "id": event.index}
        facts = {"bytes": event.second, "step": event.step}
        begin: TraceEvent = {**common, "ph": "b", "ts": axis.us(event.start_ns), "args": facts}
        sent = [] if event.sent_ns is None else [{**common, "ph": "n", "ts": axis.us(event.sent_ns)}]
        end = [] if event.end_ns is None else [{**common, "ph": "e", "ts": axis.us(event.end_ns)}]
        return [begin, *sent, *end]
    name = event.name if event.kind is EventKind.SPAN and event.name else kind
    row = _row_of_thread(event.thread)
    return [axis.span(row, name, event.start_ns, event.end_ns, of=event.name, step=event.step)]


def _of_call(axis: _TraceAxis, call: CallRecord) -> list[TraceEvent]:
    if call.started_ns is None:
        return []  # a queued call is not shown until earlier calls have ended
    facts = {
        "number": call.sequence or None,
        "type": call.dtype,
        "elements": call.count,
        "root": call.root,
        "reduction": call.reduction,
        "algorithm": call.algorithm,
        "outcome": call.outcome,
        "last to arrive": call.last_arrived,
        "queued, µs": (call.started_ns - call.arrived_ns) / 1000,
        "step": call.step,
        "tag": call.tag,
    }
    if call.operation in _MESSAGES:  # messages in one group may overlap
        common = {"name": call.operation, "cat": "message", "pid": axis.pid, "id": call.index}
        common["tid"] = _FIRST_GROUP + call.group
        end = [] if call.ended_ns is None else [{**common, "ph": "e", "ts": axis.us(call.ended_ns)}]
        return [{**common, "ph": "b", "ts": axis.us(call.started_ns), "args": facts}, *end]
    return [axis.span(_FIRST_GROUP + call.group, call.operation, call.started_ns, call.ended_ns, **facts)]


def _arrows(axes: Sequence[_TraceAxis]) -> list[TraceEvent]:
    """Returns an arrow from each send to the matching receive.

    Messages between two ranks with the same tag arrive in order. The recordings may begin at different messages, so
    messages are matched backward from the last completed one.
    """
    ends: dict[_Link, tuple[list[tuple[_TraceAxis, CallRecord]], list[tuple[_TraceAxis, CallRecord]]]] = defaultdict(
        lambda: ([], [])
    )
    for axis in axes:
        for call in axis.recording.calls:
            group = axis.recording.groups.get(call.group)
            if call.operation not in _MESSAGES or group is None or call.root is None or call.outcome != "ok":
                continue
            is_send = call.operation == "send"
            pair = (group.rank, call.root) if is_send else (call.root, group.rank)
            ends[(group.ranks, *pair, call.tag)][0 if is_send else 1].append((axis, call))
    events: list[TraceEvent] = []
    for sends, receives in ends.values():
        count = min(len(sends), len(receives))
        for (sender, sent), (receiver, received) in zip(sends[-count:], receives[-count:], strict=False):
            common = {"name": "message", "cat": "message", "id": len(events) + 1}
            for phase, axis, call, time_ns in (
                ("s", sender, sent, sent.started_ns),
                ("f", receiver, received, received.ended_ns),
            ):
                where = {"pid": axis.pid, "tid": _FIRST_GROUP + call.group, "ts": axis.us(time_ns or 0)}
                events.append({**common, "ph": phase, "bp": "e", **where})
    return events


def _with_absolute_times(trace: Mapping[str, Any]) -> list[TraceEvent]:
    """Returns a profile's events with absolute times, and with the rank added to process names."""
    base_us = trace.get("baseTimeNanoseconds", 0) / 1000
    rank = trace.get("distributedInfo", {}).get("rank")
    events = []
    for event in trace["traceEvents"]:
        moved = dict(event)
        if "ts" in moved:
            moved["ts"] = float(moved["ts"]) + base_us
        if "pid" in moved:
            moved["pid"] = f"torch.profiler{'' if rank is None else f' of rank {rank}'}: {moved['pid']}"
        events.append(moved)
    return events
