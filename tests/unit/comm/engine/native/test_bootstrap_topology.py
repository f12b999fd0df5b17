"""The placement of a group's ranks on hosts."""

from __future__ import annotations

from paceline.comm.engine.native.bootstrap import Topology


def test_the_ranks_of_a_group_are_listed_by_host_in_their_order():
    topology = Topology(2, (), ((0, 2, 4), (1, 3), (5,)), "")
    assert topology.local_ranks == (0, 2, 4)
    assert topology.hosts_of(range(6)) == [[0, 2, 4], [1, 3], [5]]
    assert topology.hosts_of([4, 3, 1, 0]) == [[0, 3], [1, 2]]  # their ranks in the group
    assert topology.hosts_of([1, 5]) == [[0], [1]]
