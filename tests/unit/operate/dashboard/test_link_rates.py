"""Link rates, computed from counters at two points in time."""

from __future__ import annotations

import pytest

from paceline.operate.dashboard.application import metrics
from paceline.operate.dashboard.job_sample import LinkRate as Sampled
from paceline.operate.dashboard.link_rates import LinkRates, links_over, rows_of
from paceline.operate.diagnosis.job_snapshot import (
    PeerTraffic,
)
from paceline.operate.diagnosis.recording import LinkRecord as Measured

MB = 1_000_000


def measured(at_s: float, sent: int, group: int = 1, peer: int = 4, **facts) -> Measured:
    known = {"received_nbytes": 0, "segments": sent // 1000, "nbytes_per_s": 5 * MB, "busy_s": 0.0, "held_s": 0.0}
    known |= {"round_trip_s": 0.002, "variation_s": 0.0005, "least_round_trip_s": 0.001, "retransmits": 0}
    known |= {"silent_s": 0.0, "connections": 2, **facts}
    return Measured(group=group, peer=peer, measured_ns=round(at_s * 1e9), sent_nbytes=sent, **known)


def test_rates_are_those_between_two_measurements():
    rates = LinkRates()
    assert [link.nbytes_per_s for link in rates.take(1, [measured(10.0, 0)], 10.2)] == [0.0]
    (link,) = rates.take(1, [measured(11.0, 6 * MB, retransmits=3)], 11.2)
    assert (link.rank, link.peer, link.nbytes_per_s, link.retransmits) == (1, 4, 6 * MB, 3)
    assert (link.round_trip_s, link.variation_s, link.delivers_nbytes_per_s) == (0.002, 0.0005, 5 * MB)
    (same,) = rates.take(1, [measured(11.0, 6 * MB)], 11.9)
    assert same.nbytes_per_s == 6 * MB
    (idle,) = rates.take(1, [measured(11.0, 6 * MB)], 20.0)
    assert idle.nbytes_per_s == 0


def test_the_links_of_several_groups_are_added_up():
    rates = LinkRates()
    rates.take(1, [measured(10.0, 0), measured(10.0, 0, group=2)], 10.0)
    (link,) = rates.take(1, [measured(11.0, MB), measured(11.0, 2 * MB, group=2, retransmits=1)], 11.0)
    assert (link.nbytes_per_s, link.retransmits) == (3 * MB, 1)
    (whole,) = links_over(1, [measured(11.0, MB), measured(11.0, 2 * MB, group=2)], 10.0)
    assert whole.nbytes_per_s == pytest.approx(0.3 * MB)


def test_connections_in_an_old_ones_place_begin_anew():
    rates = LinkRates()
    rates.take(1, [measured(10.0, 50 * MB)], 10.0)
    (link,) = rates.take(1, [measured(11.0, MB)], 11.0)
    assert link.nbytes_per_s == 0


def test_links_that_only_keep_in_touch_are_not_shown():
    def link(rank: int, peer: int, sent: int, active_s: float) -> Sampled:
        return Sampled(rank, peer, "TCP", sent / 10, round_trip_s=0.001, recent=PeerTraffic(peer, sent, active_s))

    links = [link(0, 1, 100 * MB, 0.1), link(0, 2, 2000, 0.1), link(1, 2, 100 * MB, 9.0), link(2, 0, 100 * MB, 0.1)]
    rows, network = rows_of([*links, Sampled(0, -1, "shared memory", 5.0)], {0: "h0", 1: "h1", 2: "h2"})
    assert [(row.rank, row.peer, row.is_slow) for row in rows] == [
        (0, -1, False),
        (0, 1, False),
        (1, 2, True),
        (2, 0, False),
    ]
    assert network is not None and network.startswith("the slowest link is that from h1 to h2")
    assert [row.round_trip for row in rows] == [None, 1.0, 1.0, 1.0]


def test_metrics_have_the_links():
    from simulated_training import Training

    from paceline.operate.dashboard.aggregator import DashboardAggregator

    training, board = Training(8, ranks_per_host=4), DashboardAggregator()
    training.run(3)
    board.take(training.look())
    text = metrics(board.state())
    assert 'paceline_link_round_trip_seconds{job="digits-7f3a",rank="3",peer="4"} 0.0002' in text
    assert 'paceline_link_retransmits{job="digits-7f3a",rank="3",peer="4"} 1' in text
