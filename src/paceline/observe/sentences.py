"""Words a diagnosis as one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.evidence import Rank, Scene
from paceline.observe.waiting import Wait

_MOST_NAMED = 8


def named(ranks: Sequence[int], word: str = "rank") -> str:
    """Names ranks: `rank 3`, `ranks 0-2`, `ranks 0, 2-4`.

    >>> named([3, 0, 1, 2, 6])
    'ranks 0-3, 6'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return f"{word}{'s' if len(set(ranks)) > 1 else ''} {', '.join(texts[:_MOST_NAMED])}{more}"


def lasting(seconds: float) -> str:
    """Words a time: `0.3 s`, `14 s`, `3 min`, `2.5 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def verb(count: int, plural: str) -> str:
    """Returns the verb's form for so many: `wait`, `waits`; `are`, `is`."""
    if plural in ("are", "have"):
        return {"are": "is", "have": "has"}[plural] if count == 1 else plural
    return f"{plural}s" if count == 1 else plural


def beginning(scene: Scene, ranks: Sequence[int]) -> str:
    """Returns the words that say when it happened: the first step that one of these ranks is in."""
    steps = [rank.step for rank in scene.ranks if rank.rank in ranks and rank.step is not None]
    return f"step {min(steps)}: " if steps else ""


def waiting(scene: Scene, wait: Wait, of: str = "", without: int | None = None) -> str:
    """Returns who waits, in which call and in which line: `ranks 0-2 wait in all_reduce(float32, 4096) call 7`.

    `of` names the group, and the rank `without` is left out.
    """
    who = [rank for rank in wait.waiters if rank != without]
    over = all(rank.ending is not None for rank in _of(scene, who))
    word = f"{verb(len(who), 'wait')}" if not over else "waited"
    line = next((line for rank in _of(scene, who) if (line := line_of(rank))), "")
    where = f" ({line})" if line else ""
    return f"{named(who, scene.word)} {word} in {wait.call}{of}{where}"


def line_of(rank: Rank) -> str:
    """Returns the user's line that a rank is in or has failed in; empty if it is not known."""
    if rank.place is not None and rank.place.line:
        return rank.place.line
    return rank.ending.line if rank.ending is not None else ""


def absence(scene: Scene, rank: Rank, doing: str) -> str:
    """Returns who has not come, what it does instead, and for how long."""
    is_there = rank.since_s is not None and rank.ending is None
    since = f", for {lasting(scene.now_s - rank.since_s)}" if is_there and rank.since_s is not None else ""
    return f"{named([rank.rank], scene.word)} is not there: it {doing}{since}"


def _of(scene: Scene, ranks: Sequence[int]) -> list[Rank]:
    return [rank for rank in scene.ranks if rank.rank in ranks]
