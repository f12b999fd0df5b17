"""Messages about calls whose duration differs from the prediction, and parsing of network descriptions."""

from __future__ import annotations

import pytest

from paceline.comm.engine.native.engine import describe_miss
from paceline.comm.engine.network_settings import read_network
from paceline.comm.record.layout import DTYPES
from paceline.comm.schedule.algorithms import number_of
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import NetworkLink, UplinkGroup
from paceline.comm.schedule.steps import Operation

MODEL = CostModel(LinkCost(1e-6, 1e-10), LinkCost(1e-4, 1e-9), 1e-10)
HOSTS = ((0, 1), (2, 3), (4, 5))


def test_calls_that_are_far_off_are_named_with_both_times():
    text = describe_miss(
        Operation.ALL_REDUCE, number_of("ring"), DTYPES.index("float32"), 1 << 18, 20, 5_000_000, 2_000_000
    )
    assert "all_reduce of 262,144 float32 by ring took 5 ms or more in 20 calls" in text
    assert "predicted to take 2 ms" in text and "PACELINE_NETWORK" in text


def test_a_network_is_read_as_users_write_it():
    network = read_network(
        '{"node": "1gbit,1ms", "nodes": {"2": "8mbit"}, "pairs": {"0-1": "80mbit,2ms"}, '
        '"groups": {"a": [[0, 1], "400mbit,5ms"]}}',
        MODEL,
        HOSTS,
    )
    assert network is not None
    assert network.hosts == HOSTS and network.within_host.cost.alpha_s == pytest.approx(1e-6)
    assert network.node == NetworkLink(1e-3, 1e9 / 8) and network.nodes == {2: NetworkLink(0.0, 1e6)}
    assert network.pairs == {(0, 1): NetworkLink(2e-3, 1e7), (1, 0): NetworkLink(2e-3, 1e7)}
    assert network.groups == (UplinkGroup("a", (0, 1), NetworkLink(5e-3, 5e7)),)


def test_without_a_description_there_is_no_network():
    assert read_network("", MODEL, HOSTS) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fast", "Expecting value"),
        ("[1]", "its keys must be node, nodes, pairs or groups"),
        ('{"hosts": 3}', "its keys must be node, nodes, pairs or groups"),
        ('{"nodes": {"7": "1gbit"}}', "refer to hosts 0 to 2"),
        ('{"pairs": {"0": "1gbit"}}', "is not a pair of two hosts"),
        ('{"groups": {"a": [0, 1]}}', "it must be JSON like"),
        ('{"node": "quick"}', "neither a rate"),
    ],
)
def test_a_description_that_cannot_be_read_says_why(text, why):
    with pytest.raises(ValueError, match="PACELINE_NETWORK is") as raised:
        read_network(text, MODEL, HOSTS)
    assert why in str(raised.value)
