"""How long calls take, beside what the engine predicted for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.observe.live.picture import CallRow
from paceline.observe.live.sample import CallTally, RankSample

_LOOKS = 30  # over which a kind's times are taken
_MOST_KINDS = 256
_MOST_ROWS = 12
_FAR = 1.2

_Kind = tuple[str, str, int, str]


class CallTable:
    """Keeps the recent times of each kind of call, look by look."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[int, deque[CallTally]]] = {}

    def take(self, ranks: Sequence[RankSample]) -> None:
        """Takes what the ranks have completed since the last look."""
        for each in ranks:
            for tally in each.calls:
                kind = tally.operation, tally.dtype, tally.count, tally.algorithm
                by_rank = self._kinds.pop(kind, {})  # comes behind the others, as the latest
                by_rank.setdefault(each.rank, deque(maxlen=_LOOKS)).append(tally)
                self._kinds[kind] = by_rank
        while len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def rows(self) -> tuple[CallRow, ...]:
        """Returns the kinds that take most of the time, longest first."""
        rows = [_row(kind, by_rank) for kind, by_rank in self._kinds.items()]
        return tuple(sorted(rows, key=lambda row: (-row.calls * row.actual, row.name))[:_MOST_ROWS])


def _row(kind: _Kind, by_rank: dict[int, deque[CallTally]]) -> CallRow:
    """Returns a kind's row. The rank whose calls are the shortest waits least for others that come late."""
    operation, dtype, count, algorithm = kind
    actual_s = min(
        sum(each.took_s for each in tallies) / sum(each.calls for each in tallies) for tallies in by_rank.values()
    )
    predicted_s = next(iter(by_rank.values()))[-1].predicted_s
    return CallRow(
        name=f"{operation} of {count:,} {dtype}, {algorithm}",
        calls=max(sum(each.calls for each in tallies) for tallies in by_rank.values()),
        predicted=round(predicted_s * 1e3, 3),
        actual=round(actual_s * 1e3, 3),
        is_far=not predicted_s / _FAR <= actual_s <= predicted_s * _FAR,
    )
