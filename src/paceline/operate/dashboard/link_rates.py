"""Link rates between ranks, computed from consecutive measurements, and the corresponding table rows for the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.operate.dashboard.dashboard_state import LinkRow
from paceline.operate.dashboard.job_sample import LinkRate
from paceline.operate.diagnosis import job_snapshot
from paceline.operate.diagnosis.recording import LinkRecord
from paceline.operate.diagnosis.slow_links import find_slow_link

SHARED_MEMORY, TCP = "shared memory", "TCP"

_WINDOW = 30  # number of measurements kept per link, one per second
_IDLE_S = 3.0  # a link without a measurement for this long is idle
_MOST_ROWS = 64
_WORTH_SHOWING = 0.01  # minimum traffic to display, as a fraction of the busiest link's traffic; hides control messages


class LinkRates:
    """Computes the rates of one rank's links from consecutive samples of its recording."""

    def __init__(self) -> None:
        self._past: dict[tuple[int, int], deque[LinkRecord]] = {}

    def take(self, rank: int, measured: Sequence[LinkRecord], now_s: float) -> tuple[LinkRate, ...]:
        """Returns the rank's links, ordered by peer.

        Args:
            rank: the number of the rank.
            measured: the links in the rank's recording.
            now_s: the current time on the recording's clock.
        """
        links = []
        for record in measured:
            past = self._past.setdefault((record.group, record.peer), deque(maxlen=_WINDOW))
            if past and past[-1].sent_nbytes > record.sent_nbytes:
                past.clear()  # counters decreased, so the connections were replaced
            if not past or past[-1].measured_ns != record.measured_ns:
                past.append(record)
            links.append(_recent(rank, past, now_s))
        for closed in set(self._past) - {(record.group, record.peer) for record in measured}:
            del self._past[closed]
        return _by_peer(links)


def links_over(rank: int, measured: Iterable[LinkRecord], span_s: float) -> tuple[LinkRate, ...]:
    """Returns a rank's links with rates averaged over a whole job of `span_s` seconds."""
    return _by_peer(_link(rank, record, None, record.sent_nbytes / span_s) for record in measured)


def _by_peer(links: Iterable[LinkRate]) -> tuple[LinkRate, ...]:
    found: dict[int, LinkRate] = {}
    for link in links:
        found[link.peer] = _joined(found[link.peer], link) if link.peer in found else link
    return tuple(found[peer] for peer in sorted(found))


def rows_of(links: Sequence[LinkRate], hosts: Mapping[int, str]) -> tuple[tuple[LinkRow, ...], str | None]:
    """Returns the rows to display, and a description of the slowest pair of hosts if its links are slow.

    Args:
        links: the links of all ranks.
        hosts: the host of each rank.
    """
    by_rank: dict[int, list[job_snapshot.PeerTraffic]] = {rank: [] for rank in hosts}
    for link in links:
        if link.recent is not None and link.rank in by_rank:
            by_rank[link.rank].append(link.recent)
    ranks = [job_snapshot.RankState(rank, hosts[rank], links=tuple(own)) for rank, own in by_rank.items()]
    pair = find_slow_link(ranks)
    slow = {(sender, receiver) for sender in pair.ranks[0] for receiver in pair.ranks[1]} if pair else set()
    most = max((_weight(link) for link in links if link.peer >= 0), default=0)
    shown = [link for link in links if link.peer < 0 or _weight(link) >= _WORTH_SHOWING * most]
    shown = sorted(shown, key=lambda link: -_weight(link))[:_MOST_ROWS]
    rows = tuple(_row(link, slow) for link in sorted(shown, key=lambda link: (link.rank, link.peer, link.kind)))
    return rows, pair.sentence if pair is not None else None


def _weight(link: LinkRate) -> int:
    return link.recent.sent_nbytes if link.recent is not None else 0


def _row(link: LinkRate, slow: set[tuple[int, int]]) -> LinkRow:
    return LinkRow(
        rank=link.rank,
        peer=link.peer,
        kind=link.kind,
        nbytes_per_s=round(link.nbytes_per_s),
        delivers_nbytes_per_s=round(link.delivers_nbytes_per_s) or None,
        round_trip=round(link.round_trip_s * 1e3, 3) or None,
        variation=round(link.variation_s * 1e3, 3) if link.round_trip_s else None,
        retransmits=link.retransmits if link.peer >= 0 else None,
        is_slow=(link.rank, link.peer) in slow,
    )


def _recent(rank: int, past: deque[LinkRecord], now_s: float) -> LinkRate:
    last = past[-1]
    before = past[-2] if len(past) > 1 else last
    passed_s = (last.measured_ns - before.measured_ns) / 1e9
    is_used = passed_s > 0 and now_s - last.measured_ns / 1e9 < _IDLE_S
    rate = (last.sent_nbytes - before.sent_nbytes) / passed_s if is_used else 0.0
    return _link(rank, last, past[0] if len(past) > 1 else None, rate)


def _link(rank: int, last: LinkRecord, first: LinkRecord | None, rate: float) -> LinkRate:
    """Returns a link with its traffic since the measurement `first`, or since the link was opened."""
    recent = job_snapshot.PeerTraffic(
        peer=last.peer,
        sent_nbytes=last.sent_nbytes - (first.sent_nbytes if first else 0),
        active_s=_active_s(last) - (_active_s(first) if first else 0.0),
        segments=last.segments - (first.segments if first else 0),
        retransmits=last.retransmits - (first.retransmits if first else 0),
        round_trip_s=last.round_trip_s,
        silent_s=last.silent_s,
    )
    return LinkRate(
        rank=rank,
        peer=last.peer,
        kind=TCP,
        nbytes_per_s=rate,
        delivers_nbytes_per_s=last.nbytes_per_s,
        round_trip_s=last.round_trip_s,
        variation_s=last.variation_s,
        retransmits=last.retransmits,
        recent=recent,
    )


def _active_s(measured: LinkRecord) -> float:
    return max(0.0, measured.busy_s - measured.held_s)


def _joined(one: LinkRate, other: LinkRate) -> LinkRate:
    """Merges the links that two groups have between the same ranks; keeps the busier link's round-trip time."""
    assert one.recent is not None and other.recent is not None
    busier = max(one, other, key=lambda link: (link.nbytes_per_s, _weight(link)))
    recent = job_snapshot.PeerTraffic(
        one.peer,
        one.recent.sent_nbytes + other.recent.sent_nbytes,
        one.recent.active_s + other.recent.active_s,
        one.recent.segments + other.recent.segments,
        one.recent.retransmits + other.recent.retransmits,
        busier.round_trip_s,
        max(one.recent.silent_s, other.recent.silent_s),
    )
    return replace(
        busier,
        nbytes_per_s=one.nbytes_per_s + other.nbytes_per_s,
        retransmits=one.retransmits + other.retransmits,
        recent=recent,
    )
