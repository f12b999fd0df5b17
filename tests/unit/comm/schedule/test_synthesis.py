"""Schedules for uneven networks are correct, and close to the lower bound."""

from __future__ import annotations

import pytest
from equal_bits import require_equal_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.schedule.network import Network, NetworkLink, UplinkGroup
from paceline.comm.schedule.simulation import simulate_call, simulate_schedules
from paceline.comm.schedule.steps import Operation
from paceline.comm.schedule.synthesis import can_synthesize, choose_all_reduce, pack, synthesize

MB = 1_000_000
FAST, SLOW = NetworkLink(1e-4, 1e8), NetworkLink(1e-4, 2.5e7)
NEAR = NetworkLink(1e-6, 1e10)
HOSTS = ((0,), (1,), (2,), (3,))
SLOW_HOST = Network(HOSTS, NEAR, FAST, nodes={3: SLOW})
SLOW_PAIR = Network(HOSTS, NEAR, FAST, pairs={(0, 1): SLOW, (1, 0): SLOW})
RACKS = Network(HOSTS, NEAR, FAST, (UplinkGroup("a", (0, 1), SLOW), UplinkGroup("b", (2, 3), SLOW)))
# The lower bound, in seconds per byte of the tensor, that docs/uneven-networks.md derives for any schedule.
CASES = {"slow host": (SLOW_HOST, 4e-8), "slow pair": (SLOW_PAIR, 1.5e-8), "two racks": (RACKS, 4e-8)}


@pytest.mark.parametrize("name", CASES)
def test_synthesized_schedules_are_within_a_tenth_of_the_optimum(name):
    network, optimum = CASES[name]
    assert optimum * (1 - 1e-9) <= pack(network).s_per_byte <= optimum / 0.95
    seconds = simulate_schedules(synthesize(network), network, 64 * MB).seconds
    assert optimum * 64 * MB <= seconds <= optimum * 64 * MB / 0.9


def test_one_host_of_a_rack_has_all_that_crosses_its_uplink():
    """The simulation does not model several connections that compete for the uplink."""
    racks = (UplinkGroup("a", (0, 1, 2), SLOW), UplinkGroup("b", (3, 4), SLOW))
    network = Network(tuple((rank,) for rank in range(6)), NEAR, FAST, racks, nodes={0: SLOW})
    trees = pack(network, through_gateways=True)
    hops = {hop for part in trees.parts for hop in (*part.up, *part.down)}
    racks_of = {host: number for number, rack in enumerate(((0, 1, 2), (3, 4), (5,))) for host in rack}
    assert {host for hop in hops if racks_of[hop[0]] != racks_of[hop[1]] for host in hop} == {1, 3, 5}
    linked = {(each.rank, step.peer) for each in synthesize(RACKS) for step in each.steps if step.peer >= 0}
    assert {pair for pair in linked if pair[0] // 2 != pair[1] // 2} == {(0, 2), (2, 0)}


@pytest.mark.parametrize("name", CASES)
def test_the_ring_in_the_order_of_the_ranks_is_slower(name):
    network, optimum = CASES[name]
    assert simulate_call("ring", Operation.ALL_REDUCE, 64 * MB, network).seconds >= 1.45 * optimum * 64 * MB


def test_the_choice_is_by_simulation_and_may_be_forced():
    schedules = synthesize(SLOW_PAIR)
    assert choose_all_reduce(SLOW_PAIR, schedules, 64 * MB).algorithm == "synthesized"
    small = choose_all_reduce(SLOW_PAIR, schedules, 64)
    assert small.algorithm == small.candidates[0].algorithm
    assert choose_all_reduce(SLOW_PAIR, schedules, 64 * MB, "ring").algorithm == "ring"


def test_of_two_that_are_as_fast_the_lighter_one_is_taken():
    """On a network with a slow host, a star is as fast as a tree, but its center's link carries all hosts' tensors."""
    choice = choose_all_reduce(SLOW_HOST, synthesize(SLOW_HOST), 64 * MB)
    assert choice.candidates[0].algorithm == "star"
    assert choice.algorithm == "tree" and choice.seconds <= 1.25 * choice.candidates[0].seconds
    assert "about as fast as any, and sends less over its busiest link" in choice.reason


def test_of_two_that_are_as_fast_that_with_fewer_messages_runs():
    """A tree crosses two racks' uplinks as often as a synthesized schedule, but with fewer messages."""
    choice = choose_all_reduce(RACKS, synthesize(RACKS), 8 * MB)
    assert choice.candidates[0].algorithm == "synthesized"
    assert choice.algorithm == "tree" and choice.seconds <= 1.02 * choice.candidates[0].seconds
    assert "about as fast as any, and has fewer messages" in choice.reason


def test_only_uneven_networks_of_a_few_hosts_get_schedules():
    assert can_synthesize(RACKS)
    assert not can_synthesize(Network(HOSTS, NEAR, FAST))
    many = tuple((rank,) for rank in range(9))
    assert not can_synthesize(Network(many, NEAR, FAST, nodes={0: SLOW}))
    with pytest.raises(ValueError, match="trees for 9 hosts would take too long"):
        pack(Network(many, NEAR, FAST))


@st.composite
def uneven_networks(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    firsts = [sum(sizes[:at]) for at in range(len(sizes))]
    hosts = tuple(tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True))
    rates = draw(st.lists(st.floats(1e6, 1e9), min_size=len(sizes), max_size=len(sizes)))
    nodes = {host: NetworkLink(1e-4, rate) for host, rate in enumerate(rates)}
    pairs = draw(st.dictionaries(st.sampled_from([(0, 1), (1, 0)]), st.just(SLOW)))
    return Network(hosts, NEAR, FAST, pairs=pairs, nodes=nodes)


@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(uneven_networks())
def test_any_network_gets_schedules_that_are_right(network):
    schedules = synthesize(network)
    require_equal_bits(schedules)
    assert [schedule.steps for schedule in synthesize(network)] == [schedule.steps for schedule in schedules]
