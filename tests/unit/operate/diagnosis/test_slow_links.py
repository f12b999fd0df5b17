"""Reports about links between hosts, based on the kernel's measurements."""

from __future__ import annotations

from dataclasses import replace

from paceline.operate.diagnosis.diagnosis import diagnose
from paceline.operate.diagnosis.finding import Cause
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    GroupMembership,
    JobSnapshot,
    PeerTraffic,
    RankCall,
    RankState,
)
from paceline.operate.diagnosis.slow_links import find_slow_link, slow_network

MB = 1_000_000

SUM = CallSignature("all_reduce", "float32", 1 << 20, "SUM")


def ring(speeds, nbytes=100 * MB, **facts):
    """Returns ranks on separate hosts, each of which sends to the next rank at its own speed in MB/s."""
    size = len(speeds)
    links = [
        PeerTraffic((rank + 1) % size, nbytes, nbytes / (speed * MB), segments=1000, **facts)
        for rank, speed in enumerate(speeds)
    ]
    return [RankState(rank, f"h{rank}", links=(link,)) for rank, link in enumerate(links)]


def test_the_slow_way_is_named_with_its_ranks():
    ranks = ring([900, 12, 1000])
    ranks[1] = replace(ranks[1], links=(replace(ranks[1].links[0], round_trip_s=0.031, retransmits=40),))
    way = find_slow_link(ranks)
    assert way is not None
    assert (way.hosts, way.ranks) == (("h1", "h2"), ((1,), (2,)))
    assert way.sentence == (
        "the slowest link is that from h1 to h2 (rank 1 to rank 2): 12 MB/s while data was in transit, compared with "
        "950 MB/s on the others; a round trip takes 31 ms and 4.0% of its segments were retransmitted"
    )


def test_equal_ways_are_not_told_apart():
    assert find_slow_link(ring([900, 800, 1000])) is None


def test_a_single_way_has_nothing_beside_it():
    assert find_slow_link(ring([12])) is None
    assert find_slow_link([RankState(0, "h0", links=(PeerTraffic(1, 50 * MB, 5.0),)), RankState(1, "h1")]) is None


def test_ways_that_carried_little_do_not_count():
    assert find_slow_link(ring([900, 0.001, 1000], nbytes=4096)) is None


def test_ranks_of_one_host_are_taken_together():
    fast, slow = PeerTraffic(2, 100 * MB, 0.1), PeerTraffic(3, 100 * MB, 10.0)
    ranks = [RankState(0, "h0", links=(fast,)), RankState(1, "h0", links=(slow,))]
    back = [RankState(2, "h1", links=(replace(fast, peer=0),)), RankState(3, "h1", links=(replace(fast, peer=1),))]
    way = find_slow_link([*ranks, *back])
    assert way is not None and way.hosts == ("h0", "h1") and way.ranks == ((0, 1), (2, 3))


def test_a_slow_network_names_the_slow_link():
    def calls(rank: RankState) -> RankState:
        made = [RankCall("g", n, SUM, float(n), n + 0.9, "ok", n, tcp_nbytes=4 * MB) for n in range(1, 20)]
        return replace(rank, calls=tuple(made))

    (verdict,) = slow_network([calls(rank) for rank in ring([900, 12, 1000])])
    assert (verdict.cause, verdict.blamed) == (Cause.SLOW_LINK, (1, 2))
    assert "the network between h0, h1, h2 took" in verdict.sentence
    assert "the slowest link is that from h1 to h2 (rank 1 to rank 2): 12 MB/s" in verdict.sentence
    (verdict,) = slow_network([calls(rank) for rank in ring([900, 900, 1000])])
    assert verdict.blamed == (0, 1, 2) and "slowest" not in verdict.sentence


def test_a_call_that_does_not_end_names_the_silent_link():
    def waits(rank: RankState) -> RankState:
        call = RankCall("g", 7, SUM, -20.0, all_arrived_s=-20.0)
        return replace(rank, calls=(call,), memberships={"g": GroupMembership(rank.rank, 3)}, since_s=-20.0)

    ranks = [waits(rank) for rank in ring([900, 900, 1000])]
    ranks[1] = replace(ranks[1], links=(replace(ranks[1].links[0], silent_s=14.2),))
    verdict = diagnose(JobSnapshot(0.0, tuple(ranks)))
    assert verdict is not None and verdict.cause is Cause.NO_PROGRESS
    assert "h2 (rank 2) has not answered h1 (rank 1) for 14 s" in verdict.sentence


def test_a_call_to_which_the_last_has_just_come_may_have_ended():
    """Rank 0 arrived last and was observed after the call, but the others were observed before the call completed."""

    def waits(rank: int, arrived_s: float, ended_s: float | None) -> RankState:
        call = RankCall("g", 7, SUM, arrived_s, ended_s, "ok" if ended_s is not None else "")
        return RankState(rank, f"h{rank // 2}", calls=(call,), memberships={"g": GroupMembership(rank, 4)})

    def scene(last_s: float) -> JobSnapshot:
        return JobSnapshot(0.0, (waits(0, last_s, last_s + 0.1), *(waits(rank, -28.0, None) for rank in (1, 2, 3))))

    assert diagnose(scene(-1.0)) is None
    verdict = diagnose(scene(-12.0))
    assert verdict is not None and "all 4 have reached the call, and it has not completed for 12 s" in verdict.sentence
