"""Simulated call times equal manually calculated times, respect lower bounds, and do not depend on folding."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.schedule.algorithms import ALGORITHMS, ALIKE, build, choose
from paceline.comm.schedule.cost_model import doubling_rounds
from paceline.comm.schedule.network import Network, NetworkLink, UplinkGroup
from paceline.comm.schedule.simulation import simulate_call, simulate_schedules
from paceline.comm.schedule.steps import OWN_OUTPUT, Operation, Schedule, receive, send

MB = 1_000_000
GIGABYTE = NetworkLink(0.001, 1e9)
NEAR = NetworkLink(1e-6, 10e9)
ALIKE_PAIRS = [(algorithm, operation) for algorithm in ALIKE for operation in sorted(ALIKE[algorithm])]


def least_all_reduce_s(network: Network, nbytes: int) -> float:
    """Returns a lower bound, in seconds, on the duration of an all-reduce with any algorithm.

    Each of H hosts sends on average at least 2 (H - 1) / H of the bytes (Patarasuk and Yuan 2009), and the last byte is
    delayed by the latency. The same is true of the ranks of one host.
    """
    n_hosts, per_host = len(network.hosts), len(network.hosts[0])
    members, link = (n_hosts, network.node) if n_hosts > 1 else (per_host, network.within_host)
    if members == 1:
        return 0.0
    return link.latency_s + _transfer_s(members, nbytes, link.bytes_per_s)


def alpha_beta_s(network: Network, nbytes: int) -> float:
    """Returns the alpha-beta bound, in seconds, for an all-reduce on H hosts with L ranks each.

    ceil(log2 H) alpha + ceil(log2 L) alpha' + max(2 (H - 1) / H * nbytes * beta, 2 (L - 1) / L * nbytes * beta'), where
    alpha and beta are the costs between hosts, and alpha' and beta' those within a host. The first two terms count the
    rounds, each of which at most doubles the number of ranks that a rank's data has reached; the last one counts the
    bytes that must be sent. No known algorithm attains both minima at once.
    """
    n_hosts, per_host = len(network.hosts), len(network.hosts[0])
    far, near = network.node, network.within_host
    waiting = doubling_rounds(n_hosts) * far.cost.alpha_s + doubling_rounds(per_host) * near.cost.alpha_s
    moving = max(_transfer_s(n_hosts, nbytes, far.bytes_per_s), _transfer_s(per_host, nbytes, near.bytes_per_s))
    return waiting + moving


def _transfer_s(members: int, nbytes: int, bytes_per_s: float) -> float:
    return 2 * (members - 1) / members * nbytes / bytes_per_s


def one_each(n, node=GIGABYTE, gamma=0.0, **others):
    return Network(tuple((rank,) for rank in range(n)), NEAR, node, gamma_s_per_byte=gamma, **others)


def messages(network, pairs, nbytes):
    """Simulates one message of this size between each of the pairs, all at the same time."""
    n = network.world_size
    schedules = []
    for rank in range(n):
        steps = [send(target, OWN_OUTPUT) for source, target in pairs if source == rank]
        steps += [receive(source, OWN_OUTPUT) for source, target in pairs if target == rank]
        schedules.append(Schedule(Operation.BROADCAST, "given", rank, n, 0, 1, tuple(steps)))
    return simulate_schedules(schedules, network, nbytes, record=True)


def test_a_message_takes_its_latency_and_its_bytes():
    timing = messages(one_each(2), [(0, 1)], MB)
    assert timing.seconds == pytest.approx(0.001 + 0.001)
    assert timing.ends == pytest.approx((0.001, 0.002)), "a sender ends when the last byte has left"
    assert timing.bytes_per_link == pytest.approx({"host 0 up": MB, "host 1 down": MB})


def test_an_overhead_keeps_a_sender_from_its_next_message():
    timing = messages(one_each(4, NetworkLink(0, 1e12, overhead_s=0.5)), [(0, 1), (0, 2), (0, 3)], 8)
    assert timing.seconds == pytest.approx(1.5)


def test_two_ranks_of_a_host_share_its_link():
    network = Network(((0, 1), (2,), (3,)), NEAR, GIGABYTE)
    assert messages(network, [(0, 2), (1, 3)], MB).seconds == pytest.approx(0.001 + 0.002)


def test_what_one_transfer_cannot_use_another_gets():
    """The transfer to the slow host 1 uses a tenth of host 0's link, and the transfer to host 2 uses the rest."""
    network = one_each(3, NetworkLink(0, 1e9), nodes={1: NetworkLink(0, 1e8)})
    ends = {each.target: each.end_s for each in messages(network, [(0, 1), (0, 2)], MB).transfers}
    assert ends == pytest.approx({1: 0.01, 2: MB / 9e8})


def test_a_transfer_is_faster_once_another_has_ended():
    """Two messages share host 0's link until the uplink limits the one that leaves the rack."""
    rack = UplinkGroup("rack", (0, 1), NetworkLink(0, 1e9 / 4))
    network = one_each(3, NetworkLink(0, 1e9), groups=(rack,))
    ends = {each.target: each.end_s for each in messages(network, [(0, 1), (0, 2)], MB).transfers}
    assert ends == pytest.approx({1: MB / 0.75e9, 2: 0.004})


def test_racks_share_their_uplinks_and_add_their_latency():
    racks = (UplinkGroup("a", (0, 1), NetworkLink(0.02, 1e8)), UplinkGroup("b", (2, 3), NetworkLink(0.01, 1e8)))
    timing = messages(one_each(4, groups=racks), [(0, 2), (1, 3), (2, 0)], MB)
    assert timing.ends[2] == pytest.approx(0.021 + 0.02)
    assert timing.bytes_per_link["a up"] == pytest.approx(2 * MB)
    assert timing.bytes_per_link["b up"] == pytest.approx(MB)


def test_a_pair_may_have_a_link_of_its_own():
    network = one_each(3, pairs={(0, 1): NetworkLink(0.05, 1e8)})
    timing = messages(network, [(0, 1), (1, 2)], MB)
    assert timing.seconds == pytest.approx(0.05 + 0.01)
    assert timing.bytes_per_link["hosts 0-1"] == pytest.approx(MB)


def test_loss_sends_again_and_slows_tcp_down():
    lossy = NetworkLink(0.01, 1e9, loss=0.01)
    most = 1448 / 0.02 * (1.5 / 0.0199) ** 0.5  # a packet may be lost on either host's link
    assert messages(one_each(2, lossy), [(0, 1)], MB).seconds == pytest.approx(0.01 + MB / most, rel=1e-6)
    timing = messages(one_each(2, NetworkLink(0, 1e9, loss=0.5)), [(0, 1)], MB)
    assert timing.seconds == pytest.approx(0.004)


def test_a_ring_of_four_hosts_takes_six_turns():
    """The chunks of a small tensor are one piece each, so every round waits for the previous one."""
    network = one_each(4, NetworkLink(0.001, 1e9), gamma=1e-9)
    turn = 0.001 + 40_000 / 1e9
    timing = simulate_call("ring", Operation.ALL_REDUCE, 160_000, network)
    assert timing.seconds == pytest.approx(6 * turn + 3 * 40_000 * 1e-9)


def test_a_long_chain_is_a_pipe():
    """All pieces follow the first, which crosses three links in sequence."""
    timing = simulate_call("ring", Operation.BROADCAST, 100 * MB, one_each(4, NetworkLink(0, 1e9)))
    assert timing.seconds == pytest.approx(0.1 + 2 * (128 << 10) / 1e9)


def test_a_late_rank_delays_the_others_until_it_comes():
    network = one_each(4)
    alone = simulate_call("ring", Operation.ALL_REDUCE, MB, network).seconds
    late = simulate_call("ring", Operation.ALL_REDUCE, MB, network, arrivals=[0, 0, 7, 0])
    assert min(late.ends) >= 7
    assert late.seconds <= alone * 1.001, "what the others have sent is there when it comes"


def test_a_slow_rank_reduces_slowly():
    network = one_each(2, NetworkLink(0, 1e12), gamma=1e-9)
    assert simulate_call("star", Operation.REDUCE, MB, network, speeds=[0.5, 1]).seconds == pytest.approx(
        0.002, rel=0.01
    )
    assert simulate_call("star", Operation.REDUCE, MB, network, speeds=[1, 0.5]).seconds == pytest.approx(
        0.001, rel=0.01
    )


def test_as_many_arrivals_as_ranks_must_be_given():
    with pytest.raises(ValueError, match="3 arrivals or speeds were given for 4 ranks"):
        simulate_call("ring", Operation.ALL_REDUCE, MB, one_each(4), arrivals=[0, 0, 0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_barrier_waits_for_the_last(algorithm):
    network = Network.uniform(2, 3, node=GIGABYTE, within_host=NEAR)
    if Operation.BARRIER in ALGORITHMS[algorithm]:
        timing = simulate_call(algorithm, Operation.BARRIER, 0, network, arrivals=[0, 0, 0, 0, 5, 0])
        assert min(timing.ends) >= 5
        assert 0.001 <= timing.seconds < 0.1


def test_packed_data_takes_as_much_less_time_as_it_is_smaller():
    network = one_each(4, NetworkLink(0, 1e8))
    plain = simulate_call("ring", Operation.ALL_REDUCE, 64 * MB, network).seconds
    packed = simulate_call("int8", Operation.ALL_REDUCE, 64 * MB, network).seconds
    assert packed == pytest.approx(plain * 66 / 256, rel=0.03)


links = st.builds(
    NetworkLink,
    st.floats(0, 0.01),
    st.floats(1e7, 1e11),
    overhead_s=st.one_of(st.just(0.0), st.floats(0, 1e-4)),
)
networks = st.builds(
    Network.uniform,
    st.integers(1, 6),
    st.integers(1, 4),
    node=links,
    within_host=links,
    gamma_s_per_byte=st.one_of(st.just(0.0), st.floats(0, 1e-8)),
)
quickly = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quickly
@given(networks, st.sampled_from(list(ALGORITHMS)), st.integers(64, 3 * MB))
def test_no_all_reduce_beats_the_lower_bound(network, algorithm, nbytes):
    seconds = simulate_call(algorithm, Operation.ALL_REDUCE, nbytes, network).seconds
    assert seconds >= least_all_reduce_s(network, nbytes) * (1 - 1e-9)


@quickly
@given(networks, st.sampled_from(ALIKE_PAIRS), st.integers(1000, 3 * MB))
def test_folded_and_unfolded_take_the_same_time(network, pair, nbytes):
    folded, whole = (simulate_call(*pair, nbytes, network, fold=fold) for fold in (True, False))
    assert folded.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert folded.ends == pytest.approx(whole.ends, rel=1e-6)
    assert folded.bytes_per_link == pytest.approx(whole.bytes_per_link, rel=1e-6)


@quickly
@given(networks, st.integers(1, 1000))
def test_a_ring_of_short_tensors_has_its_closed_form(network, nbytes):
    """With one rank per host: 2 (n - 1) rounds, of which n - 1 reduce."""
    network = Network.uniform(len(network.hosts), 1, node=network.node, within_host=network.within_host)
    n, cost = network.world_size, network.node.cost
    part = max(1.0, nbytes / n)
    expected = 2 * (n - 1) * (cost.alpha_s + part * cost.beta_s_per_byte)
    assert simulate_call("ring", Operation.ALL_REDUCE, nbytes, network).seconds == pytest.approx(expected)


@pytest.mark.parametrize("gbit", [25, 100])
@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 30])
def test_ten_thousand_ranks_come_near_the_bound(gbit, nbytes):
    """The network has full bisection bandwidth, and the closed forms determine the choice of the algorithm."""
    node = NetworkLink(50e-6, gbit * 1e9 / 8)
    network = Network.uniform(1250, 8, node=node, within_host=NetworkLink(2e-6, 20e9), gamma_s_per_byte=1e-10)
    chosen = choose(network.cost_model(), Operation.ALL_REDUCE, nbytes, 10_000, network.hosts).algorithm
    timing = simulate_call(chosen, Operation.ALL_REDUCE, nbytes, network)
    assert len(timing.ends) == 10_000
    assert timing.seconds <= 1.2 * alpha_beta_s(network, nbytes)


def test_what_is_too_large_to_simulate_is_refused():
    network = Network.uniform(5000, 2, node=GIGABYTE, within_host=NEAR)
    with pytest.raises(ValueError, match="too many to simulate: choose hierarchical on equal hosts"):
        simulate_call("ring", Operation.ALL_REDUCE, MB, network, arrivals=[*range(10_000)])


def test_schedules_that_wait_for_ever_are_refused():
    schedules = [build("ring", Operation.BROADCAST, rank, 2, 0) for rank in range(2)]
    with pytest.raises(ValueError, match="wait for ever"):
        simulate_schedules([schedules[0]._replace(steps=()), schedules[1]], one_each(2), MB)
