"""Finds out which way between hosts is slow, from what the kernel measured of the connections.

A connection's speed is what it carried in the time in which data was under way and the other rank had room for it. That
is the time which the network took: a rank that sends seldom, or whose peer is slow to read, does not look like a slow
network. What the network should do, nobody knows, so a way is called slow only beside faster ones.

Finds out whether the network between hosts holds a job up: how long calls last once all ranks have come.

That no rank was late and calls last all the same tells a slow link from a slow rank. The rate says how slow it is; what
the link should do, no recording knows, so the hosts are named and the judgement is left to the reader. `ways.py` says
which link it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.operate.diagnosis.call_history import meetings_of, span_of
from paceline.operate.diagnosis.finding import Cause, Diagnosis, lasting, named
from paceline.operate.diagnosis.job_snapshot import PeerTraffic, RankState

_SLOWER = 2.0  # than the other ways' median, at least
_FEWEST_NBYTES = 1 << 20
_FEWEST_S = 0.05  # that a slow way was in use
_TICK_S = 0.004  # the kernel counts the time in use in ticks
_LONG_ROUND_TRIP_S = 1e-3
_LOSSES = 1e-3  # the share of segments sent again that is worth telling
_SILENT_S = 3.0


@dataclass(frozen=True)
class HostPair:
    """All connections from one host to another.

    Attributes:
        hosts: from where to where.
        ranks: the ranks that sent, and those that they sent to.
        nbytes_s: the speed of a connection.
        others_nbytes_s: that of the other ways, as their median.
        round_trip_s: the longest usual one.
        lost_share: the part of the segments that was sent again.
    """

    hosts: tuple[str, str]
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes_s: float
    others_nbytes_s: float
    round_trip_s: float
    lost_share: float

    @property
    def sentence(self) -> str:
        """What to say of it, as a part of a sentence."""
        facts = []
        if self.round_trip_s >= _LONG_ROUND_TRIP_S:
            facts.append(f"a round trip takes {self.round_trip_s * 1e3:.3g} ms")
        if self.lost_share >= _LOSSES:
            facts.append(f"{self.lost_share:.1%} of its segments were sent again")
        more = f"; {' and '.join(facts)}" if facts else ""
        return (
            f"the slowest link is that from {self.hosts[0]} to {self.hosts[1]} ({named(self.ranks[0])} to "
            f"{named(self.ranks[1])}): {_rate(self.nbytes_s)} while data was under way, where the others did "
            f"{_rate(self.others_nbytes_s)}{more}"
        )


def find_slow_link(ranks: Sequence[RankState]) -> HostPair | None:
    """Returns the slowest way between hosts if it is much slower than the others; None also if nothing tells."""
    uses: dict[tuple[str, str], list[tuple[int, PeerTraffic]]] = defaultdict(list)
    hosts = {rank.rank: rank.host for rank in ranks}
    for rank in ranks:
        for link in rank.links:
            if link.peer in hosts and hosts[link.peer] != rank.host:
                uses[rank.host, hosts[link.peer]].append((rank.rank, link))
    speeds = {way: speed for way, used in uses.items() if (speed := _speed(link for _, link in used)) is not None}
    if len(speeds) < 2:
        return None
    slowest = min(speeds, key=lambda way: speeds[way])
    others = median(speed for way, speed in speeds.items() if way != slowest)
    active_s = sum(link.active_s for _, link in uses[slowest])
    if speeds[slowest] * _SLOWER > others or active_s < _FEWEST_S:
        return None
    used = [(rank, link) for rank, link in uses[slowest] if link.sent_nbytes >= _FEWEST_NBYTES] or uses[slowest]
    return HostPair(
        slowest,
        (tuple(sorted({rank for rank, _ in used})), tuple(sorted({link.peer for _, link in used}))),
        speeds[slowest],
        others,
        max(link.round_trip_s for _, link in used),
        sum(link.retransmits for _, link in used) / max(1, sum(link.segments for _, link in used)),
    )


def find_silent_links(ranks: Sequence[RankState]) -> list[tuple[int, int, float]]:
    """Returns the connections on which an answer is owed for seconds, as (rank, other rank, seconds)."""
    found = [(rank.rank, link.peer, link.silent_s) for rank in ranks for link in rank.links]
    return sorted((each for each in found if each[2] >= _SILENT_S), key=lambda each: -each[2])


def _speed(links: Iterable[PeerTraffic]) -> float | None:
    kept = list(links)
    nbytes, active_s = sum(link.sent_nbytes for link in kept), sum(link.active_s for link in kept)
    return nbytes / max(active_s, _TICK_S) if nbytes >= _FEWEST_NBYTES else None


def _rate(nbytes_s: float) -> str:
    return f"{nbytes_s / 1e6:.3g} MB/s"


WORTH_TELLING = 0.4  # of the time
_SLOW_BYTES_S = 100e6  # a gigabit link does more
_WORTH_TELLING_S = 0.5
_MOST_HOSTS = 4


@dataclass(frozen=True)
class InterHostTraffic:
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


def transfers(ranks: Sequence[RankState]) -> InterHostTraffic | None:
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
    return InterHostTraffic(hosts, tuple(sorted(who)), time_s, span_of(meetings), nbytes / time_s)


def slow_network(ranks: Sequence[RankState]) -> list[Diagnosis]:
    """Returns what to say if the network took most of the time and is slow."""
    found = transfers(ranks)
    if found is None or found.share < WORTH_TELLING or found.time_s < _WORTH_TELLING_S:
        return []
    if found.nbytes_s > _SLOW_BYTES_S:
        return []
    way = find_slow_link(ranks)
    blamed = found.ranks if way is None else tuple(sorted({*way.ranks[0], *way.ranks[1]}))
    which = f"; {way.sentence}" if way is not None else ""
    hosts = ", ".join(found.hosts[:_MOST_HOSTS]) + (", ..." if len(found.hosts) > _MOST_HOSTS else "")
    sentence = (
        f"the network between {hosts} took {lasting(found.time_s)}, {found.share:.0%} of the time, after all ranks had "
        f"come to the calls: a rank sent {found.nbytes_s / 1e6:.3g} MB/s{which}. If the link can do more, look at it "
        "(`paceline doctor --peer` measures it)"
    )
    return [Diagnosis(Cause.SLOW_LINK, blamed, sentence)]
