"""Each pair of hosts is measured once; the measurements show which links differ, if any."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.engine.network_settings import read_network
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import NetworkLink, UplinkGroup, describe_differences, round_robin_rounds

MODEL = CostModel(LinkCost(1e-6, 1e-10), LinkCost(1e-4, 1e-9), 1e-10)
FAST, SLOW = 5e7, 1.25e7


@given(st.integers(2, 40))
def test_each_pair_meets_once_and_nobody_twice_in_a_round(n):
    rounds = round_robin_rounds(n)
    assert len(rounds) == n - 1 + n % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(n), 2))
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs) >= n - 1


def measured(n, nodes=None, pairs=None, racks=(), uplink=float("inf"), noise=0.0, seed=0):
    """Returns the measurements from a tournament in which pairs across racks share uplinks."""
    random, found = Random(seed), {}
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    for concurrent in round_robin_rounds(n):
        crossing = [pair for pair in concurrent if rack_of.get(pair[0]) != rack_of.get(pair[1])]
        for pair in concurrent:
            rate = min([FAST, (pairs or {}).get(pair, FAST), *((nodes or {}).get(host, FAST) for host in pair)])
            latency_s = 1e-4
            if pair in crossing:
                rate, latency_s = min(rate, uplink / len(crossing)), 2e-3
            found[pair] = NetworkLink(latency_s * random.uniform(1, 1 + noise), rate * random.uniform(1 - noise, 1))
    return found


def network_of(n, found):
    return read_network(describe_differences(n, found), MODEL, tuple((host,) for host in range(n)))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("noise", [0, 0.3])
def test_links_that_are_alike_are_not_described(n, noise):
    for seed in range(20):
        assert describe_differences(n, measured(n, noise=noise, seed=seed)) == ""


@pytest.mark.parametrize("n", [3, 4, 7])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_host_is_found(n, slow):
    network = network_of(n, measured(n, nodes={slow: SLOW}, noise=0.2))
    assert network.nodes.keys() == {slow} and not network.pairs and not network.groups
    assert network.nodes[slow].bytes_per_s == pytest.approx(SLOW, rel=0.25)
    assert network.node.bytes_per_s == pytest.approx(FAST, rel=0.25)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_slow_pair_is_found(n):
    network = network_of(n, measured(n, pairs={(0, 2): SLOW}, noise=0.2))
    assert network.pairs.keys() == {(0, 2), (2, 0)} and not network.nodes and not network.groups
    assert network.pairs[0, 2].bytes_per_s == pytest.approx(SLOW, rel=0.25)


@pytest.mark.parametrize(
    "racks", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3), (4, 5))]
)
def test_racks_with_a_thin_uplink_are_found(racks):
    n = sum(map(len, racks))
    network = network_of(n, measured(n, racks=racks, uplink=SLOW, noise=0.1))
    assert sorted(group.hosts for group in network.groups) == sorted(racks)
    assert not network.pairs and not network.nodes
    for group in network.groups:
        assert group.uplink.bytes_per_s == pytest.approx(SLOW, rel=0.35)
        assert group.uplink.latency_s == pytest.approx(1.9e-3, rel=0.2)


def test_rates_that_follow_no_rule_are_taken_as_they_come():
    found = measured(6, pairs=dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], SLOW))
    assert describe_differences(6, found) == ""


def test_what_is_described_names_the_usual_link_too():
    text = describe_differences(3, measured(3, nodes={1: SLOW}))
    assert text == '{"node": "400000kbit,100.0us", "nodes": {"1": "100000kbit,100.0us"}}'
    assert isinstance(network_of(4, measured(4, racks=((0, 1), (2, 3)), uplink=SLOW)).groups[0], UplinkGroup)
