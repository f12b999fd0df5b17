"""Turns a process's recording into what a diagnosis needs of its rank."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.evidence import Call, Header, Link, Place, Rank, Seat
from paceline.observe.recording import Call as Recorded
from paceline.observe.recording import Event, Group, Recording
from paceline.record.names import EventKind

MOST_CALLS = 1024  # of each rank; so many tell the period of a training loop
_NS = 1e-9


def witness(recording: Recording, number: int | None = None) -> Rank:
    """Returns what a recording says of its rank, on the clock of its host.

    Args:
        recording: of one process.
        number: the rank's number in the job; by default the one that the recording has.
    """
    groups = {serial: f"{group.identity:x}" for serial, group in recording.groups.items()}
    early, late = recording.calls[:-MOST_CALLS], recording.calls[-MOST_CALLS:]
    kept = [*(call for call in early if not call.is_over), *late]
    calls = tuple(_call(each, groups) for each in kept if each.group in groups)
    return Rank(
        rank=number if number is not None else recording.rank if recording.rank is not None else -1,
        host=recording.host,
        pid=recording.pid,
        seats={
            groups[serial]: Seat(group.rank, group.size, _name(group, recording))
            for serial, group in recording.groups.items()
        },
        calls=calls,
        step=recording.step or None,
        since_s=_since_s(recording),
        place=_place(recording.open_events()),
        data_s=sum(
            event.end_ns - event.start_ns
            for event in recording.events
            if event.kind is EventKind.DATA_WAIT and event.end_ns is not None
        )
        * _NS,
        links=_links(recording),
    )


def _name(group: Group, recording: Recording) -> str:
    """Returns the group's name, with its number among those of the same name."""
    alike = sorted(each.serial for each in recording.groups.values() if each.name == group.name)
    name = group.name if group.name.startswith("group") else f"group {group.name}"
    return f"{name} (no. {alike.index(group.serial) + 1} of {len(alike)})" if len(alike) > 1 else name


def _call(call: Recorded, groups: dict[int, str]) -> Call:
    is_message = call.tag is not None
    return Call(
        group=groups[call.group],
        sequence=call.sequence,
        header=Header(
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


def _links(recording: Recording) -> tuple[Link, ...]:
    """Returns the links by the other rank, with the connections of all groups together."""
    found: dict[int, Link] = {}
    for link in recording.links:
        known = found.get(link.peer, Link(link.peer, 0, 0.0))
        found[link.peer] = Link(
            peer=link.peer,
            sent_nbytes=known.sent_nbytes + link.sent_nbytes,
            active_s=known.active_s + max(0.0, link.busy_s - link.held_s),
            segments=known.segments + link.segments,
            retransmits=known.retransmits + link.retransmits,
            round_trip_s=max(known.round_trip_s, link.round_trip_s),
            silent_s=max(known.silent_s, link.silent_s),
        )
    return tuple(found.values())


def _since_s(recording: Recording) -> float | None:
    """Returns when the rank last ended a call or an event that is not over, or began to record."""
    ends = [call.ended_ns for call in recording.calls if call.ended_ns is not None]
    begun = [event.start_ns for event in recording.open_events() if event.kind in _WAITS]
    known = [*ends, *begun] or [recording.started_ns]
    return max(known) * _NS


_WAITS = (EventKind.DATA_WAIT, EventKind.CHECKPOINT)


def _place(events: Sequence[Event]) -> Place | None:
    """Returns where the rank said that it is, for when its stack is not known."""
    for event in reversed(events):
        if event.kind is EventKind.DATA_WAIT:
            return Place(event.name or "a data loader", is_loader=True)
        if event.kind is EventKind.CHECKPOINT:
            return Place(f"checkpoint {event.name or ''}".strip())
        if event.kind is EventKind.SPAN and event.name:
            return Place(f'span "{event.name}"')
    return None
