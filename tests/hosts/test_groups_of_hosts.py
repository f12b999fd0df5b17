"""Groups that span several hosts: members, rendezvous, and several groups at once."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.network import ipv4, ipv6
from hosts.talking import rank
from hosts.telling import told_by, wait_for


def meet_with_another_secret() -> str:
    if rank() == 1:
        os.environ["PACELINE_SECRET"] = "not the secret of this job, but as long"
    with pytest.raises((dist.AuthenticationError, dist.RendezvousError)) as caught:
        dist.init_process_group(timeout=timedelta(seconds=3))
    return str(caught.value)


def test_a_host_with_another_secret_is_told_so(hosts):
    here, there = hosts(2, 1)(meet_with_another_secret)
    assert "does not hold this job's secret" in there and "PACELINE_SECRET" in there
    assert "waited 3 s for 2 ranks; 0 arrived, 1 did not" in here


def use_two_groups() -> None:
    dist.init_process_group(timeout=timedelta(seconds=20))
    first, second = dist.new_group([0, 1, 2, 3]), dist.new_group([3, 1, 0])
    order = [first, second] if rank() % 2 == 0 else [second, first]
    works = []
    for size in (10, 300_000, 1):
        for group in order:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                tensor = torch.full((size,), 1.0)
                works.append((tensor, group, dist.all_reduce(tensor, group=group, async_op=True)))
    for tensor, group, work in works:
        wait_for(work)
        assert (tensor == group.size()).all()
    # A broken group does not affect the other groups.
    if rank() in (0, 3):
        count = 5 if rank() == 0 else 6
        assert told_by(lambda: dist.all_reduce(torch.ones(count), group=second))[0] == "CollectiveMismatchError"
    elif rank() == 1:
        assert told_by(lambda: dist.all_reduce(torch.ones(5), group=second))[0] == "CollectiveMismatchError"
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=first)
    assert (tensor == 4).all()
    dist.barrier()


def test_two_groups_at_once_and_one_that_breaks(hosts):
    hosts(2, 2)(use_two_groups)


def peers_addresses() -> set[str]:
    """Returns the remote addresses of this process's TCP connections, except the store's."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    ports = {str(connection.getsockname()[1]), str(connection.getpeername()[1])}
                    found |= {connection.getpeername()[0]} if os.environ["MASTER_PORT"] not in ports else set()
        except OSError:
            continue
    return found


def meet_on(interface: str | None, variable: bool, url: str | None) -> set[str]:
    if variable and interface:
        os.environ["PACELINE_IFACE"] = interface
    place = {"rank": rank(), "world_size": 2} if url else {}
    dist.init_process_group(
        init_method=url and url.format(port=os.environ["MASTER_PORT"]),
        interface=None if variable else interface,
        **place,
    )
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    addresses = peers_addresses()
    dist.barrier()
    return addresses


@pytest.mark.parametrize("variable", [False, True], ids=["argument", "variable"])
def test_the_interface_that_was_asked_for_is_used(hosts, variable):
    assert hosts(2, 1, networks=2)(meet_on, "eth1", variable, None) == [{ipv4(1, 1)}, {ipv4(0, 1)}]


def test_hosts_meet_over_ipv6(hosts):
    assert hosts(2, 1)(meet_on, None, True, f"tcp://[{ipv6(0)}]:{{port}}") == [{ipv6(1)}, {ipv6(0)}]
