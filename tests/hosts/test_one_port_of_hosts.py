"""Jobs whose machines accept connections at one port only, from all others or only from some."""

from __future__ import annotations

import os
import socket
import subprocess
from datetime import timedelta

import pytest
import torch
from launching import processes_with
from listeners import ATTEMPTS, try_each_way

import paceline as dist
from hosts.machines import Machines
from hosts.network import ipv4
from hosts.talking import await_word, say
from paceline.cli.doctor.listening import Listener, listeners_of

PORT = 29500
TRAIN = """
import os, sys, time, torch, paceline as dist
dist.init_process_group()
rank = dist.get_rank()
group = dist.new_group()
open(os.path.join(sys.argv[1], f"ready{rank}"), "w").close()
while True:
    over = torch.tensor([float(os.path.exists(os.path.join(sys.argv[1], "end")))])
    dist.all_reduce(over, group=group)
    if over.item() == dist.get_world_size():
        break
    time.sleep(0.01)
print("reduced", over.item())
dist.destroy_process_group()
"""


def behind_firewalls(machines, hosts: int, closed: tuple[int, ...] = ()) -> Machines:
    """Machines of which each accepts connections at one port, and those in `closed` none at all."""
    here = machines(hosts, bridged=True)
    here.network.close_ports(*(host for host in range(hosts) if host not in closed), but=PORT)
    if closed:
        here.network.close_ports(*closed)
    return here


def start(here: Machines, host: int, hosts: int, *flags: str) -> subprocess.Popen[str]:
    place = ("--nnodes", str(hosts), "--node-rank", str(host), "--master-addr", ipv4(0))
    return here.start(host, "--port", str(PORT), *place, *flags, str(here.script), str(here.directory))


@pytest.mark.parametrize("level", ["auth", "encrypt"])
def test_a_job_needs_one_port_of_each_machine(machines, level):
    here = behind_firewalls(machines, 2)
    here.script.write_text(TRAIN)
    launchers = [start(here, host, 2, "--nproc-per-node=2", "--security", level) for host in range(2)]
    here.wait(lambda: all((here.directory / f"ready{rank}").exists() for rank in range(4)))
    listening = {each for each in listeners_of(processes_with(here.mark)) if each.kind != "unix"}
    assert listening == {Listener("tcp", ipv4(host), PORT) for host in range(2)}
    assert len(here.network.inside[1].run(try_each_way, Listener("tcp", ipv4(0), PORT))) == len(ATTEMPTS)
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
        assert here.said(launcher, "out").count("reduced 4.0") == 2


TORCHS = """
import torch, torch.distributed as dist
for turn in range(2):
    dist.init_process_group("paceline")
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    print("reduced", tensor.tolist(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_torch_distributed_comes_through_the_port(machines):
    here = behind_firewalls(machines, 2, closed=(1,))
    here.script.write_text(TORCHS)
    launchers = [start(here, host, 2) for host in range(2)]
    for launcher in launchers:
        here.expect(launcher, 0)
        assert here.said(launcher, "out").count("reduced [3.0, 3.0, 3.0]") == 2


def test_a_machine_that_accepts_nothing_connects_itself(machines):
    here = behind_firewalls(machines, 3, closed=(1,))
    here.script.write_text(TRAIN)
    launchers = [start(here, host, 3) for host in range(3)]  # rank 2 would connect to rank 1
    here.wait(lambda: all((here.directory / f"ready{rank}").exists() for rank in range(3)))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
        assert "reduced 3.0" in here.said(launcher, "out")


def test_two_machines_that_accept_nothing_are_named(machines):
    here = behind_firewalls(machines, 3, closed=(1, 2))
    here.script.write_text(TRAIN)
    launchers = [start(here, host, 3) for host in range(3)]
    for launcher in launchers:
        here.expect(launcher, 1)
    said = here.said(launchers[1])
    for words in ("rank 1 (h1, pid ", "rank 2 (h2, pid ", "cannot connect to each other", f"tried {ipv4(1)}, port {PORT}"):
        assert words in said, said
    assert f"this rank has tried {ipv4(2)}, port {PORT} (" in said


def test_the_serving_machine_has_the_first_ranks(machines):
    """In any order of arrival: all can reach it."""
    here = behind_firewalls(machines, 2, closed=(1,))
    here.script.write_text(TRAIN)
    flags = ("--port", str(PORT), "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint", ipv4(0))
    words = (*flags, str(here.script), str(here.directory))
    other = here.start(1, *words)
    here.wait(lambda: "waiting up to 600 s for a launcher" in here.said(other))
    serving = here.start(0, *words)
    here.wait(lambda: all((here.directory / f"ready{rank}").exists() for rank in range(2)))
    here.say("end")
    for launcher, rank in ((serving, 0), (other, 1)):
        here.expect(launcher, 0)
        assert f"[rank {rank}] reduced 2.0" in here.said(launcher, "out")


def test_a_port_in_use_is_named_before_workers_start(machines):
    here = machines(2)
    here.script.write_text(TRAIN)
    taken = here.network.inside[1].run(_listening, ipv4(1))
    try:
        launchers = [start(here, host, 2) for host in range(2)]
        here.expect(launchers[1], 1)
        assert f"share port {PORT} of {ipv4(1)}" in here.said(launchers[1])
        assert not (here.directory / "ready1").exists()
    finally:
        taken.close()


def _listening(address: str) -> socket.socket:
    return socket.create_server((address, PORT))


def test_a_launcher_without_the_flag_is_told(machines):
    here = machines(2)
    here.script.write_text(TRAIN)
    start(here, 0, 2)
    place = ("--nnodes=2", "--node-rank=1", "--master-addr", ipv4(0), "--master-port", str(PORT))
    without = here.start(1, *place, str(here.script), str(here.directory))
    here.expect(without, 1)
    assert "start every launcher with the same --port" in here.said(without)


def reduce_behind_one_port(directory: str) -> list[float]:
    await_word(directory, "the firewalls are there")
    dist.init_process_group(port=PORT, timeout=timedelta(seconds=90))
    tensor = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    group = dist.new_group([1, 2])
    told = [tensor[0].item()]
    if dist.get_rank() in (1, 2):
        dist.all_reduce(tensor, group=group)
        told.append(tensor[0].item())
    dist.barrier()
    listening = {each for each in listeners_of([os.getpid()]) if each.kind != "unix"}
    assert {each.port for each in listening} <= {PORT}
    dist.barrier()
    dist.destroy_process_group()
    return told


def test_ranks_without_a_launcher_share_the_port(hosts, tmp_path):
    with hosts(2, 2, bridged=True).start(reduce_behind_one_port, str(tmp_path)) as world:
        world.network.close_ports(0, 1, but=PORT)
        say(str(tmp_path), "the firewalls are there")
        assert world.join(100) == [[6.0], [6.0, 12.0], [6.0, 12.0], [6.0]]


def refuse_gloo_between_hosts() -> str:
    with pytest.raises(ValueError, match="engine 'gloo' would connect the hosts h0, h1 at ports of its own"):
        dist.init_process_group("gloo", port=PORT, timeout=timedelta(seconds=30))
    return "refused"


def test_an_engine_with_ports_of_its_own_is_refused(hosts):
    assert hosts(2, 1)(refuse_gloo_between_hosts) == ["refused", "refused"]
