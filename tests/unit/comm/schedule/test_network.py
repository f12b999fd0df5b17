"""Networks and links: string representations and validation."""

from __future__ import annotations

import pytest

from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network, NetworkLink, UplinkGroup, parse_links

LINK = NetworkLink(1e-3, 1e9)


def test_links_are_read_as_people_write_them():
    found = parse_links("node=25gbit,0.05ms, region=1Gbit,20ms,loss=0.1%")
    assert found == {"node": NetworkLink(0.05e-3, 25e9 / 8), "region": NetworkLink(0.02, 1e9 / 8, 0.001)}
    assert parse_links("node=100mbit") == {"node": NetworkLink(0.0, 1e8 / 8)}
    assert parse_links("pair=8kbit,2us,loss=1")["pair"] == NetworkLink(2e-6, 1000, 0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "specifies no link"),
        ("node=fast", "'fast' is neither a rate like 25gbit"),
        ("node=0.05ms", "the link 'node' .* has no rate"),
        ("node=1gbit,loss=high", "'loss=high' is neither"),
        ("node=xgbit", "'xgbit' is neither"),
        ("node=1gbit,loss=100%", "must have a rate above 0"),
        ("node=0gbit,0ms", "must have a rate above 0"),
    ],
)
def test_what_is_no_link_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        parse_links(text)


def test_a_network_lists_every_rank_once():
    with pytest.raises(ValueError, match="hosts must list each rank exactly once"):
        Network(((0, 1), (1, 2)), LINK, LINK)
    with pytest.raises(ValueError, match="each in at most one group"):
        Network(((0,), (1,)), LINK, LINK, groups=(UplinkGroup("a", (0, 1), LINK), UplinkGroup("b", (1,), LINK)))
    with pytest.raises(ValueError, match="refer to hosts 0 to 1"):
        Network(((0,), (1,)), LINK, LINK, nodes={2: LINK})


def test_the_cost_model_has_the_slowest_and_the_farthest_link():
    plain = Network.uniform(
        4, 2, node=NetworkLink(1e-4, 1e9), within_host=NetworkLink(1e-6, 1e10), gamma_s_per_byte=1e-10
    )
    assert plain.cost_model() == CostModel(LinkCost(1e-6, 1e-10, 0.0), LinkCost(1e-4, 1e-9, 0.0), 1e-10)
    racks = (UplinkGroup("a", (0, 1), NetworkLink(0.01, 1e8)), UplinkGroup("b", (2, 3), NetworkLink(0.02, 1e9)))
    uneven = Network(plain.hosts, plain.within_host, plain.node, racks)
    assert uneven.cost_model().between_hosts == LinkCost(0.02 + 1e-4, 1e-8, 0.0)


def test_costs_become_a_network_and_costs_again():
    model = CostModel(LinkCost(1e-6, 1e-10), LinkCost(1e-4, 1e-9), 1e-10)
    again = Network.of_costs(model, ((0, 1), (2, 3))).cost_model()
    assert again.between_hosts.alpha_s == pytest.approx(1e-4)
    assert again.between_hosts.beta_s_per_byte == pytest.approx(1e-9)
    assert again.between_hosts.busy_s == model.between_hosts.busy_s == pytest.approx(0.5e-4)


def test_only_equal_hosts_in_order_are_uniform():
    assert Network.uniform(3, 2, node=LINK, within_host=LINK).is_uniform
    assert not Network(((0, 2), (1, 3)), LINK, LINK).is_uniform
    assert not Network(((0,), (1,)), LINK, LINK, nodes={1: LINK}).is_uniform


def test_a_group_has_its_part_of_the_network():
    slow, own = NetworkLink(1e-3, 1e8), NetworkLink(1e-3, 1e7)
    groups = (UplinkGroup("a", (0, 1), slow), UplinkGroup("b", (2,), slow))
    whole = Network(((0, 1), (2, 3), (4, 5)), LINK, LINK, groups, {(0, 1): own, (1, 2): own}, 1e-10, {1: slow, 2: own})
    part = whole.among([3, 2, 0])
    assert part.hosts == ((2,), (0, 1))
    assert part.groups == (UplinkGroup("a", (0, 1), slow),)
    assert part.pairs == {(0, 1): own} and part.nodes == {1: slow}
    assert part.gamma_s_per_byte == 1e-10
