"""The doctor finds all listening sockets of a running job. The sockets reject strangers without affecting the job."""

from __future__ import annotations

import secrets
import signal
import subprocess

import pytest
from launching import ENVIRONMENT, command, kill, processes_in, processes_with, script, wait_until
from listeners import ATTEMPTS, try_each_way

from hosts.fixture import skip_where_not_permitted
from hosts.machines import Machines
from hosts.network import ipv4
from paceline.cli.doctor.security import ListeningSocket, listening_sockets_of

__all__ = ["script"]  # a fixture

TRAIN = """
import os, sys, time, torch, paceline as dist
dist.init_process_group()
open(os.path.join(sys.argv[1], f"ready{dist.get_rank()}"), "w").close()
while True:
    over = torch.tensor([float(os.path.exists(os.path.join(sys.argv[1], "end")))])
    dist.all_reduce(over)
    if over.item() == dist.get_world_size():
        break
    time.sleep(0.01)
dist.destroy_process_group()
"""


def test_a_job_of_one_machine_listens_on_no_network(script, tmp_path):
    path, mark = script(TRAIN), f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
    name, value = mark.split("=")
    words = command("--nproc-per-node", "2", path, str(tmp_path))
    launcher = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, name: value})
    try:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        found = listening_sockets_of(processes_with(mark))
        assert {each.kind for each in found} == {"unix"}  # the store's socket, and those of the ranks
        for listener in found:
            assert len(try_each_way(listener)) == len(ATTEMPTS)
        doctor = [*command()[:-1], "doctor", "--security"]
        unset = {name: value for name, value in ENVIRONMENT.items() if name != "PACELINE_SECURITY"}
        told = subprocess.run(doctor, capture_output=True, text=True, timeout=60, env=unset)
        assert all(f"{listener}: reachable from this machine only" in told.stdout for listener in found)
        assert "level: not chosen: connections are authenticated" in told.stdout
        (tmp_path / "end").touch()
        said = launcher.communicate(timeout=60)[1]
        assert launcher.returncode == 0, said
        refusals = [line for line in said.splitlines() if "was refused" in line or "refused" in line]
        assert refusals, said
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        kill(processes_with(mark))


@pytest.mark.parametrize("level", ["auth", "encrypt"])
def test_a_job_of_two_machines_refuses_strangers(level):
    skip_where_not_permitted()
    with Machines(2) as here:
        here.script.write_text(TRAIN)
        flags = ("--security", level, "--nnodes", "2", "--master-addr", ipv4(0), "--master-port", "29400")
        launchers = [
            here.start(host, *flags, "--node-rank", str(host), str(here.script), str(here.directory))
            for host in range(2)
        ]
        here.wait(lambda: all((here.directory / f"ready{rank}").exists() for rank in range(2)))
        found = listening_sockets_of(processes_in(here.directory))
        tcp = {each for each in found if each.kind != "unix"}
        assert {each.kind for each in tcp} == {"tcp"}
        assert {each.address for each in tcp} == {ipv4(0)}  # the rendezvous and rank 0's store; no wildcard address
        assert ListeningSocket("tcp", ipv4(0), 29400) in tcp and len(tcp) == 2
        for listener in tcp:
            ways = here.network.inside[1].run(try_each_way, listener)
            assert len(ways) == len(ATTEMPTS)
        here.say("end")
        for launcher in launchers:
            here.expect(launcher, 0)
        refused = [line for line in here.said(launchers[0]).splitlines() if "was refused: " in line]
        assert all(ipv4(1) in line for line in refused)
        for channel in ("node", "store"):
            assert sum(f"a connection for '{channel}' was refused" in line for line in refused) == 3, refused
        if level == "encrypt":
            assert any("connected without encryption" in line for line in refused)
