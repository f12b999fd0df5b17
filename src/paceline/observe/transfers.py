"""Finds out whether the network between hosts holds a job up: how long calls last once all ranks have come.

That no rank was late and calls last all the same tells a slow link from a slow rank. The rate says how slow it is; what
the link should do, no recording knows, so the hosts are named and the judgement is left to the reader. `ways.py` says
which link it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.evidence import Rank
from paceline.observe.meetings import meetings_of, span_of
from paceline.observe.sentences import lasting
from paceline.observe.verdict import Cause, Verdict
from paceline.observe.ways import slow_way

WORTH_TELLING = 0.4  # of the time
_SLOW_BYTES_S = 100e6  # a gigabit link does more
_WORTH_TELLING_S = 0.5
_MOST_HOSTS = 4


@dataclass(frozen=True)
class Transfers:
    """What the calls between hosts took after their last rank had come.

    Attributes:
        hosts: between which.
        ranks: the ranks on them.
        time_s: of all these calls together.
        span_s: from the first to the last call.
        nbytes_s: what a rank sent on the way, a second.
    """

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    time_s: float
    span_s: float
    nbytes_s: float

    @property
    def share(self) -> float:
        """The part of the time that they took."""
        return self.time_s / self.span_s if self.span_s > 0 else 0.0


def transfers(ranks: Sequence[Rank]) -> Transfers | None:
    """Returns what calls between hosts took; None if there were none. The ranks' clocks must be the same."""
    by_number = {rank.rank: rank for rank in ranks}
    meetings = meetings_of(ranks)
    time_s, nbytes, who = 0.0, 0, set[int]()
    for meeting in meetings:
        sent = max(call.tcp_nbytes for call in meeting.values())
        ends = [call.ended_s for call in meeting.values() if call.ended_s is not None]
        if sent and ends:
            time_s += max(0.0, max(ends) - max(call.arrived_s for call in meeting.values()))
            nbytes += sent
            who |= set(meeting)
    hosts = tuple(sorted({by_number[rank].host for rank in who}))
    if len(hosts) < 2 or time_s <= 0:
        return None
    return Transfers(hosts, tuple(sorted(who)), time_s, span_of(meetings), nbytes / time_s)


def slow_network(ranks: Sequence[Rank]) -> list[Verdict]:
    """Returns what to say if the network took most of the time and is slow."""
    found = transfers(ranks)
    if found is None or found.share < WORTH_TELLING or found.time_s < _WORTH_TELLING_S:
        return []
    if found.nbytes_s > _SLOW_BYTES_S:
        return []
    way = slow_way(ranks)
    blamed = found.ranks if way is None else tuple(sorted({*way.ranks[0], *way.ranks[1]}))
    which = f"; {way.sentence}" if way is not None else ""
    hosts = ", ".join(found.hosts[:_MOST_HOSTS]) + (", ..." if len(found.hosts) > _MOST_HOSTS else "")
    sentence = (
        f"the network between {hosts} took {lasting(found.time_s)}, {found.share:.0%} of the time, after all ranks had "
        f"come to the calls: a rank sent {found.nbytes_s / 1e6:.3g} MB/s{which}. If the link can do more, look at it "
        "(`paceline doctor --peer` measures it)"
    )
    return [Verdict(Cause.SLOW_LINK, blamed, sentence)]
