"""On unequal links between hosts, all-reduces use schedules for uneven networks, and the results are correct."""

from __future__ import annotations

import os

import torch

import paceline as dist
from hosts.fixture import Hosts, HostsWorld
from hosts.network import Network

RACKS = '{"node": "1gbit,0.1ms", "groups": {"a": [[0, 1], "100mbit,1ms"], "b": [[2, 3], "100mbit,1ms"]}}'


def chosen(group=None):
    text = dist.explain("all_reduce", 1 << 20, group=group)
    return next(line.split()[1] for line in text.splitlines() if line.startswith("->"))


def sum_on(group, ranks):
    tensor = torch.arange(1 << 18, dtype=torch.float32) + dist.get_rank()
    dist.all_reduce(tensor, group=group)
    expected = len(ranks) * torch.arange(1 << 18, dtype=torch.float32) + sum(ranks)
    assert torch.equal(tensor, expected)
    average = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
    torch.testing.assert_close(average, torch.full((5,), sum(ranks) / len(ranks)))


def sums_of_racks():
    if int(os.environ["RANK"]) == 0:
        os.environ["PACELINE_NETWORK"] = RACKS
    dist.init_process_group()
    everyone = range(dist.get_world_size())
    three = dist.new_group([4, 1, 2], algorithm=None)
    forced = dist.new_group(list(everyone), algorithm="ring")
    assert chosen() == "synthesized"
    assert chosen(forced) == "ring"
    for group, ranks in ((None, everyone), (three, [4, 1, 2]), (forced, everyone)):
        if dist.get_rank() in ranks:
            sum_on(group, ranks)
    if dist.get_rank() in (4, 1, 2):
        assert "synthesized" in dist.explain("all_reduce", 1 << 20, group=three), "one was made for these three, too"
    dist.barrier()
    dist.destroy_process_group()


class SlowLast(Hosts):
    """Three hosts, the last of which has a slow link."""

    def __init__(self) -> None:
        super().__init__(3, rate="400mbit")

    def start(self, fn, *args):
        network = Network(3, 1, self.mtu, self.rate, None)
        try:
            network.bound(2, "40mbit")
            return HostsWorld(network, self.ranks_of_hosts, fn, args)
        except BaseException:
            network.close()
            raise


def sums_over_a_slow_link():
    dist.init_process_group()
    text = dist.explain("all_reduce", 1 << 20)
    sum_on(None, range(3))
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_a_slow_link_is_found_when_the_ranks_meet(hosts):
    texts = SlowLast()(sums_over_a_slow_link)
    assert "synthesized" in texts[0], "a schedule was made for this network"
    assert texts == [texts[0]] * 3


def test_racks_of_unequal_hosts_sum_by_a_schedule_of_their_own(hosts):
    hosts([2, 1, 1, 2])(sums_of_racks)


def test_racks_of_equal_hosts_sum_by_a_schedule_of_their_own(hosts):
    hosts(4, 2)(sums_of_racks)
