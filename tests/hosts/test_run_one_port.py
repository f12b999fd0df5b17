"""`paceline run --port` on machines behind firewalls."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import processes_in
from listeners import ATTEMPTS, try_each_way

from hosts.machines import Machines
from hosts.network import ipv4
from hosts.test_run_handover import TRAINS_ON
from hosts.test_run_machines import MEETS
from paceline.cli.doctor.security import ListeningSocket, listening_sockets_of

PORT = 29500
TRAINS = """
import os, sys, time, torch, torch.distributed, paceline as dist
dist.init_process_group()
torch.distributed.init_process_group("paceline")
tensor = torch.ones(1)
torch.distributed.all_reduce(tensor)
open(os.path.join(sys.argv[1], f"ready{dist.get_rank()}"), "w").close()
while True:
    over = torch.tensor([float(os.path.exists(os.path.join(sys.argv[1], "end")))])
    dist.all_reduce(over)
    if over.item() == dist.get_world_size():
        break
    time.sleep(0.01)
print("reduced", tensor.item(), over.item(), flush=True)
torch.distributed.destroy_process_group()
dist.destroy_process_group()
"""


def listening_of(here: Machines) -> set[ListeningSocket]:
    """Returns the addresses on which the job's processes listen for other machines."""
    return {each for each in listening_sockets_of(processes_in(here.directory)) if each.kind != "unix"}


def start(here: Machines, host: int, *flags: str) -> subprocess.Popen[str]:
    place = ("--nnodes=2", "--node-rank", str(host), "--master-addr", ipv4(0))
    return here.start(host, "--port", str(PORT), *place, *flags, str(here.script), str(here.directory))


def test_a_job_needs_one_port_of_each_machine(machines):
    here = machines(2, bridged=True)
    here.network.close_ports(0, 1, but=PORT)
    here.script.write_text(TRAINS)
    launchers = [start(here, host, "--security=encrypt") for host in range(2)]
    here.wait(lambda: all((here.directory / f"ready{rank}").exists() for rank in range(2)), 90)
    assert listening_of(here) == {ListeningSocket("tcp", ipv4(host), PORT) for host in range(2)}
    assert len(here.network.inside[1].run(try_each_way, ListeningSocket("tcp", ipv4(0), PORT))) == len(ATTEMPTS)
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
        assert "reduced 2.0 2.0" in here.said(launcher, "out")


def test_the_serving_machine_has_the_first_ranks(machines):
    """The order of arrival does not matter, because all machines can connect to the serving machine."""
    here = machines(2, bridged=True)
    here.network.close_ports(0, but=PORT)
    here.network.close_ports(1)
    here.script.write_text(MEETS.replace("met.world_size", "met.rank"))
    flags = ("--port", str(PORT), "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint", ipv4(0), str(here.script))
    other = here.start(1, *flags)
    here.wait(lambda: "waiting up to 600 s for a launcher" in here.said(other))
    serving = here.start(0, *flags)
    for launcher, rank in ((serving, 0), (other, 1)):
        here.expect(launcher, 0)
        assert f"[rank {rank}] met {rank}" in here.said(launcher, "out")


def test_a_token_leads_through_the_port(machines):
    here = machines(2, bridged=True)
    here.network.close_ports(0, but=PORT)
    here.network.close_ports(1)
    words = (str(here.script), str(here.directory))
    flags = ("--print-token", "--nnodes=2", "--master-addr", ipv4(0), "--port", str(PORT))
    serving = here.start(0, *flags, *words, secret=None)
    here.wait(lambda: here.said(serving, "out").endswith("\n"))
    verb, join, dash, *rest, token = here.said(serving, "out").split()
    assert (verb, join, dash, rest) == ("paceline", "join", "-", ["--port", str(PORT), *words])
    other = here.start(1, "-", *rest, secret=None, verb="join", says=token)
    here.wait_for(2)
    here.say("end")
    here.expect(serving, 0)
    here.expect(other, 0)


SSH = """
import os, subprocess, sys
sys.path.insert(0, {tests!r})
from hosts.namespaces import Host, enter
enter(Host("h1", {network!r}))
os.execvp("sh", ["sh", "-c", sys.argv[-1]])
"""


def test_machines_by_ssh_meet_behind_the_port(machines):
    """The program that replaces ssh enters the other host's network namespace."""
    here = machines(2, bridged=True)
    here.network.close_ports(0, but=PORT)
    here.network.close_ports(1)
    here.script.write_text(MEETS)
    ssh = here.directory / "ssh.py"
    ssh.write_text(SSH.format(tests=str(Path(__file__).parents[1]), network=here.network.hosts[1].network))
    words = ("--hosts", f"{ipv4(0)}:1,{ipv4(1)}:1", "--ssh", f"{sys.executable} {ssh}", "--port", str(PORT))
    launcher = here.start(0, *words, str(here.script))
    here.expect(launcher, 0)
    assert here.said(launcher, "out").count("met 2") == 2


def listen_on(address: str) -> socket.socket:
    return socket.create_server((address, PORT))


def test_a_port_in_use_is_named_before_workers_start(machines):
    here = machines(2)
    with here.network.inside[1].run(listen_on, ipv4(1)):
        launchers = [start(here, host) for host in range(2)]
        here.expect(launchers[1], 1)
    assert f"share port {PORT} of {ipv4(1)}" in here.said(launchers[1])
    assert here.log() == []


@pytest.mark.parametrize("level", ["auth", "encrypt"])
def test_a_launcher_without_the_flag_is_told(machines, level):
    here = machines(2)
    start(here, 0, "--security", level)
    place = ("--nnodes=2", "--node-rank=1", "--master-addr", ipv4(0), "--master-port", str(PORT))
    without = here.start(1, "--security", level, *place, str(here.script), str(here.directory))
    here.expect(without, 1)
    assert "start every launcher with the same --port" in here.said(without)


def test_an_elastic_job_needs_one_port_of_each_machine(machines):
    """The replacement for a killed worker receives the state from a worker on the other machine."""
    here = machines(2, bridged=True)
    here.network.close_ports(0, 1, but=PORT)
    here.script.write_text(TRAINS_ON.replace('os.environ["PACELINE_WORKER"]', "str(os.getpid())"))
    words = ("--elastic", "--port", str(PORT), "--nnodes=2", "--rdzv-endpoint", ipv4(0), str(here.script))
    launchers = [here.start(host, *words, str(here.directory)) for host in range(2)]
    here.wait(lambda: len(here.notes("began")) == 2, 90)
    assert listening_of(here) == {ListeningSocket("tcp", ipv4(host), PORT) for host in range(2)}
    os.kill(int(here.notes("began")[0]), signal.SIGKILL)
    here.wait(lambda: len(here.notes("began")) == 3, 90)
    assert not any(launcher.poll() for launcher in launchers)
