"""Lists the ranks of a job, each with how far it came."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.evidence import Rank
from paceline.observe.sentences import named

_MOST_LINES = 64


def summary(ranks: Sequence[Rank], world_size: int) -> list[str]:
    """Returns a line for each rank, and one for the ranks whose recordings are missing."""
    lines = [_line(rank) for rank in ranks[:_MOST_LINES]]
    if len(ranks) > _MOST_LINES:
        lines.append(f"... and {len(ranks) - _MOST_LINES} more ranks")
    missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if missing:
        lines.append(f"{named(missing)}: no recording")
    return lines


def _line(rank: Rank) -> str:
    step = f"step {rank.step}, " if rank.step is not None else ""
    last = max(rank.calls, key=lambda call: call.arrived_s, default=None)
    if last is None:
        return f"rank {rank.rank} ({rank.host}, pid {rank.pid}): {step}no call"
    state = "in" if last.ended_s is None else "failed in" if last.is_open else "last ended"
    return f"rank {rank.rank} ({rank.host}, pid {rank.pid}): {step}{state} {last}"
