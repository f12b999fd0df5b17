"""Ranks on machines that accept connections on only one port, from all other machines or from only some."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch

import paceline as dist
from hosts.network import ipv4
from hosts.talking import await_word, rank, say
from paceline.cli.doctor.security import listening_sockets_of
from paceline.comm.one_port.port_multiplexer import PortMultiplexer
from paceline.interop import torch_backend

PORT = 29500
OPEN = "the firewalls are there"


def run_behind_firewalls(
    hosts: Callable[..., object], ranks: list[int], closed: set[int], fn: Callable[..., object], tmp_path: Path
) -> list[object]:
    """Runs a function on hosts that accept connections on one port. The hosts in `closed` accept no connections."""
    with hosts(ranks, bridged=True).start(fn, str(tmp_path)) as world:
        world.network.close_ports(*(set(range(len(ranks))) - closed), but=PORT)
        if closed:
            world.network.close_ports(*closed)
        say(str(tmp_path), OPEN)
        return world.join(100)


def reduce_behind_one_port(directory: str) -> list[float]:
    await_word(directory, OPEN)
    dist.init_process_group(port=PORT, timeout=timedelta(seconds=90))
    tensor = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    told = [tensor[0].item()]
    pair = [1, dist.get_world_size() - 1]
    group = dist.new_group(pair)
    if dist.get_rank() in pair:
        dist.all_reduce(tensor, group=group)
        told.append(tensor[0].item())
    dist.barrier()
    listening = {each for each in listening_sockets_of([os.getpid()]) if each.kind != "unix"}
    assert {each.port for each in listening} <= {PORT}
    dist.barrier()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("level", ["auth", "encrypt"])
def test_ranks_without_a_launcher_share_the_port(hosts, tmp_path, monkeypatch, level):
    monkeypatch.setenv("PACELINE_SECURITY", level)
    told = run_behind_firewalls(hosts, [2, 2], set(), reduce_behind_one_port, tmp_path)
    assert told == [[6.0], [6.0, 12.0], [6.0], [6.0, 12.0]]


def test_a_machine_that_accepts_nothing_connects_itself(hosts, tmp_path):
    """Normally ranks 2 and 3 would connect to rank 1, which is on the closed host."""
    told = run_behind_firewalls(hosts, [1, 1, 2], {1}, reduce_behind_one_port, tmp_path)
    assert told == [[6.0], [6.0, 12.0], [6.0], [6.0, 12.0]]


def reduce_over_the_other_network() -> tuple[float, set[tuple[str, int]]]:
    dist.init_process_group(port=PORT, interface="eth1", timeout=timedelta(seconds=90))
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.barrier()
    listening = {(each.address, each.port) for each in listening_sockets_of([os.getpid()]) if each.kind != "unix"}
    dist.barrier()
    dist.destroy_process_group()
    return tensor[0].item(), listening


def test_each_network_of_a_machine_has_the_same_port(hosts):
    told = hosts(2, 1, networks=2)(reduce_over_the_other_network)
    assert told == [
        (2.0, {(ipv4(0), PORT), (ipv4(0, 1), PORT)}),  # the first network carries the store's connections
        (2.0, {(ipv4(1, 1), PORT)}),
    ]


def fail_to_meet() -> str:
    if rank() > 0:
        PortMultiplexer._listen_on = lambda *_: None  # so that connections are refused at once, as some firewalls do
    with pytest.raises(dist.RendezvousError) as caught:
        dist.init_process_group(port=PORT, timeout=timedelta(seconds=90))
    return str(caught.value)


def test_two_machines_that_accept_nothing_are_named(hosts):
    for said in hosts(3, 1)(fail_to_meet):  # rank 1 detects it and reports it to the others
        for words in (
            "rank 1 (h1, pid ",
            "rank 2 (h2, pid ",
            "cannot connect to each other",
            f"has tried {ipv4(1)}, port {PORT} (",
            f"this rank has tried {ipv4(2)}, port {PORT} (",
            f"must accept TCP connections at port {PORT}",
        ):
            assert words in said, said


def reduce_by_torch(directory: str) -> list[float]:
    await_word(directory, OPEN)
    os.environ["PACELINE_PORT"] = str(PORT)  # if set at startup, `import torch` does what follows
    handlers = vars(import_module("torch.distributed.rendezvous"))["_rendezvous_handlers"]
    torch_backend.replace_env_handler()
    assert handlers["env"] is torch_backend.env_rendezvous_handler
    told = []
    for _ in range(2):
        torch.distributed.init_process_group("paceline", timeout=timedelta(seconds=90))
        tensor = torch.full((3,), float(torch.distributed.get_rank() + 1))
        torch.distributed.all_reduce(tensor)
        told.append(tensor[0].item())
        listening = {each for each in listening_sockets_of([os.getpid()]) if each.kind != "unix"}
        assert {each.port for each in listening} <= {PORT}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return told


def test_torch_distributed_comes_through_the_port(hosts, tmp_path):
    assert run_behind_firewalls(hosts, [1, 1], {1}, reduce_by_torch, tmp_path) == [[3.0, 3.0]] * 2


def refuse_gloo_between_hosts() -> str:
    os.environ["PACELINE_SECURITY"] = "auth"  # with encryption, gloo is rejected for a different reason
    with pytest.raises(ValueError, match="engine 'gloo' would connect the hosts h0, h1 at ports of its own"):
        dist.init_process_group("gloo", port=PORT, timeout=timedelta(seconds=30))
    return "refused"


def test_an_engine_with_ports_of_its_own_is_refused(hosts):
    assert hosts(2, 1)(refuse_gloo_between_hosts) == ["refused", "refused"]
