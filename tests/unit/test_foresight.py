"""A group says once that its calls take other times than predicted, by the least of many."""

from __future__ import annotations

import pytest

from paceline.engine.native.foresight import Foresight
from paceline.engine.native.uneven import read_network
from paceline.schedule.cost import Choice, CostModel, LinkCost, Prediction
from paceline.schedule.network import Group, Link
from paceline.schedule.steps import Operation

CHOICE = Choice(Operation.ALL_REDUCE, 1 << 20, 4, 4, "ring", (Prediction("tree", 1e-3), Prediction("ring", 2e-3)), "")
MODEL = CostModel(LinkCost(1e-6, 1e-10), LinkCost(1e-4, 1e-9), 1e-10)
HOSTS = ((0, 1), (2, 3), (4, 5))


def said(times):
    foresight = Foresight()
    return [text for took_s in times if (text := foresight.compare(CHOICE, took_s)) is not None]


def test_calls_that_are_far_off_are_mentioned_once():
    (text,) = said([5e-3] * 60)
    assert "all_reduce of 1,048,576 bytes by ring took 5 ms at least in 20 calls" in text
    assert "predicted to take 2 ms" in text and "PACELINE_NETWORK" in text
    assert len(said([1e-3] * 20)) == 1


def test_calls_as_predicted_and_few_calls_are_not_mentioned():
    assert not said([2.3e-3] * 60)
    assert not said([9e-3] * 19)


def test_one_call_in_time_shows_that_the_others_only_waited():
    assert not said([9e-3] * 10 + [2e-3] + [9e-3] * 60)


def test_a_network_is_read_as_users_write_it():
    network = read_network(
        '{"node": "1gbit,1ms", "nodes": {"2": "8mbit"}, "pairs": {"0-1": "80mbit,2ms"}, '
        '"groups": {"a": [[0, 1], "400mbit,5ms"]}}',
        MODEL,
        HOSTS,
    )
    assert network is not None
    assert network.hosts == HOSTS and network.within_host.cost.alpha_s == pytest.approx(1e-6)
    assert network.node == Link(1e-3, 1e9 / 8) and network.nodes == {2: Link(0.0, 1e6)}
    assert network.pairs == {(0, 1): Link(2e-3, 1e7), (1, 0): Link(2e-3, 1e7)}
    assert network.groups == (Group("a", (0, 1), Link(5e-3, 5e7)),)


def test_without_a_description_there_is_no_network():
    assert read_network("", MODEL, HOSTS) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fast", "Expecting value"),
        ("[1]", "its parts are node, nodes, pairs and groups"),
        ('{"hosts": 3}', "its parts are node, nodes, pairs and groups"),
        ('{"nodes": {"7": "1gbit"}}', "name hosts from 0 to 2"),
        ('{"pairs": {"0": "1gbit"}}', "invalid literal"),
        ('{"groups": {"a": [0, 1]}}', "it must be JSON like"),
        ('{"node": "quick"}', "neither a rate"),
    ],
)
def test_a_description_that_cannot_be_read_says_why(text, why):
    with pytest.raises(ValueError, match="PACELINE_NETWORK is") as raised:
        read_network(text, MODEL, HOSTS)
    assert why in str(raised.value)
