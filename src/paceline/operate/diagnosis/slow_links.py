"""Detection of slow links between hosts, and of jobs delayed by a slow network.

The speed of a connection is the amount of data sent divided by the time during which data was in flight and the peer's
receive buffer was not full. Thus a connection on which a rank rarely sends, or on which the peer reads slowly, is not
mistaken for a slow connection. The nominal speed of the network is unknown, so a link is considered slow only if other
links are faster.

The network delays a job if calls take a long time to complete after the last rank has arrived. A slow rank would arrive
late instead. The message for the user states the hosts and the rate, but does not assess the rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.operate.diagnosis.call_history import match_calls, span_of
from paceline.operate.diagnosis.finding import Cause, Diagnosis, lasting, named
from paceline.operate.diagnosis.job_snapshot import PeerTraffic, RankState

_SLOWER = 2.0  # minimum ratio of the other links' median speed to the speed of a slow link
_FEWEST_NBYTES = 1 << 20
_FEWEST_S = 0.05  # minimum time that a slow link must have been in use
_TICK_S = 0.004  # resolution of the kernel's counters for the time in use
_LONG_ROUND_TRIP_S = 1e-3
_LOSSES = 1e-3  # minimum fraction of retransmitted segments that is reported
_SILENT_S = 3.0
WORTH_TELLING = 0.4  # a slow network is reported if it takes at least this fraction of the time
_WORTH_TELLING_S = 0.5
_SLOW_BYTES_S = 100e6  # a network below this rate is slow; a gigabit link is faster
_MOST_HOSTS = 4


@dataclass(frozen=True)
class HostPair:
    """All connections from one host to another.

    Attributes:
        hosts: the sending and the receiving host.
        ranks: the sending and the receiving ranks.
        nbytes_s: the speed of one connection, in bytes per second.
        others_nbytes_s: the median speed between other pairs of hosts.
        round_trip_s: the longest smoothed round-trip time.
        lost_share: the fraction of segments that were retransmitted.
    """

    hosts: tuple[str, str]
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes_s: float
    others_nbytes_s: float
    round_trip_s: float
    lost_share: float

    @property
    def sentence(self) -> str:
        """A description for the user, phrased as part of a sentence."""
        facts = []
        if self.round_trip_s >= _LONG_ROUND_TRIP_S:
            facts.append(f"a round trip takes {self.round_trip_s * 1e3:.3g} ms")
        if self.lost_share >= _LOSSES:
            facts.append(f"{self.lost_share:.1%} of its segments were retransmitted")
        more = f"; {' and '.join(facts)}" if facts else ""
        return (
            f"the slowest link is that from {self.hosts[0]} to {self.hosts[1]} ({named(self.ranks[0])} to "
            f"{named(self.ranks[1])}): {_rate(self.nbytes_s)} while data was in transit, compared with "
            f"{_rate(self.others_nbytes_s)} on the others{more}"
        )


def find_slow_link(ranks: Sequence[RankState]) -> HostPair | None:
    """Returns the slowest pair of hosts if it is much slower than the other pairs, otherwise None."""
    uses: dict[tuple[str, str], list[tuple[int, PeerTraffic]]] = defaultdict(list)
    hosts = {rank.rank: rank.host for rank in ranks}
    for rank in ranks:
        for link in rank.links:
            if link.peer in hosts and hosts[link.peer] != rank.host:
                uses[rank.host, hosts[link.peer]].append((rank.rank, link))
    speeds = {pair: speed for pair, used in uses.items() if (speed := _speed(link for _, link in used)) is not None}
    if len(speeds) < 2:
        return None
    slowest = min(speeds, key=lambda pair: speeds[pair])
    others = median(speed for pair, speed in speeds.items() if pair != slowest)
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
    """Returns links with an overdue acknowledgment as (rank, other rank, seconds), longest delay first."""
    found = [(rank.rank, link.peer, link.silent_s) for rank in ranks for link in rank.links]
    return sorted((link for link in found if link[2] >= _SILENT_S), key=lambda link: -link[2])


def _speed(links: Iterable[PeerTraffic]) -> float | None:
    kept = list(links)
    nbytes, active_s = sum(link.sent_nbytes for link in kept), sum(link.active_s for link in kept)
    return nbytes / max(active_s, _TICK_S) if nbytes >= _FEWEST_NBYTES else None


def _rate(nbytes_s: float) -> str:
    return f"{nbytes_s / 1e6:.3g} MB/s"


@dataclass(frozen=True)
class InterHostTraffic:
    """Calls between hosts, and the time from the arrival of each call's last rank to the end of the call.

    Attributes:
        hosts: the names of the hosts.
        ranks: the ranks on these hosts.
        time_s: the total time from the arrival of each call's last rank to the end of the call, in seconds.
        span_s: the time from the first to the last call, in seconds.
        nbytes_s: the rate at which a rank sent, in bytes per second.
    """

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    time_s: float
    span_s: float
    nbytes_s: float

    @property
    def share(self) -> float:
        """The fraction of the time span that these calls took."""
        return self.time_s / self.span_s if self.span_s > 0 else 0.0


def transfers(ranks: Sequence[RankState]) -> InterHostTraffic | None:
    """Returns the traffic between hosts, or None if there was none. The ranks' times must be on one clock."""
    by_number = {rank.rank: rank for rank in ranks}
    matched = match_calls(ranks)
    time_s, nbytes, who = 0.0, 0, set[int]()
    for calls in matched:
        sent = max(call.tcp_nbytes for call in calls.values())
        ends = [call.ended_s for call in calls.values() if call.ended_s is not None]
        if sent and ends:
            time_s += max(0.0, max(ends) - max(call.ready_s for call in calls.values()))
            nbytes += sent
            who |= set(calls)
    hosts = tuple(sorted({by_number[rank].host for rank in who}))
    if len(hosts) < 2 or time_s <= 0:
        return None
    return InterHostTraffic(hosts, tuple(sorted(who)), time_s, span_of(matched), nbytes / time_s)


def slow_network(ranks: Sequence[RankState]) -> list[Diagnosis]:
    """Returns a list with one diagnosis if the network is slow and delays the job, otherwise an empty list."""
    found = transfers(ranks)
    if found is None or found.share < WORTH_TELLING or found.time_s < _WORTH_TELLING_S:
        return []
    if found.nbytes_s > _SLOW_BYTES_S:
        return []
    pair = find_slow_link(ranks)
    blamed = found.ranks if pair is None else tuple(sorted({*pair.ranks[0], *pair.ranks[1]}))
    which = f"; {pair.sentence}" if pair is not None else ""
    hosts = ", ".join(found.hosts[:_MOST_HOSTS]) + (", ..." if len(found.hosts) > _MOST_HOSTS else "")
    sentence = (
        f"the network between {hosts} took {lasting(found.time_s)}, {found.share:.0%} of the time, after all ranks had "
        f"reached the calls: a rank sent {found.nbytes_s / 1e6:.3g} MB/s{which}. If the link should be faster, check "
        "it (`paceline doctor --peer` measures it)"
    )
    return [Diagnosis(Cause.SLOW_LINK, blamed, sentence)]
