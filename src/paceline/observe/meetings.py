"""Matches the calls of several ranks: a meeting is one call of a group, as each of its ranks made it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.observe.evidence import Call, Rank


def meetings_of(ranks: Sequence[Rank]) -> list[dict[int, Call]]:
    """Returns each call that ended well and that at least two ranks remember, by rank, in the order of their ends."""
    calls: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for rank in ranks:
        for call in rank.calls:
            if not call.is_open and not call.is_message:
                calls[call.group, call.sequence][rank.rank] = call
    known = [meeting for meeting in calls.values() if len(meeting) > 1]
    return sorted(known, key=lambda meeting: max(call.ended_s or 0.0 for call in meeting.values()))


def span_of(meetings: Sequence[Mapping[int, Call]]) -> float:
    """Returns the seconds from the first arrival to the last end."""
    if not meetings:
        return 0.0
    first = min(call.arrived_s for call in meetings[0].values())
    return max(call.ended_s or 0.0 for call in meetings[-1].values()) - first
