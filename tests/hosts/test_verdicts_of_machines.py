"""The launcher that serves the rendezvous reports missing ranks on all machines."""

from __future__ import annotations

import pytest

from hosts.fixture import skip_where_not_permitted
from hosts.machines import Machines
from hosts.network import ipv4

JOB = """
import os, signal
import torch, paceline as dist
dist.init_process_group()
t = torch.ones(4)
for step in range(20):
    if step == 10 and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(t)
"""


@pytest.fixture
def machines():
    skip_where_not_permitted()
    with Machines(2) as made:
        yield made


def test_the_serving_launcher_names_a_rank_elsewhere(machines):
    machines.script.write_text(JOB)
    place = ("--nnodes=2", "--master-addr", ipv4(0), "--master-port=29400", "--nproc-per-node=2", "--no-pin")
    flags = ("--stall-after=2", "--shutdown-timeout=1")
    first, second = (
        machines.start(host, *place, *flags, "--node-rank", str(host), str(machines.script)) for host in range(2)
    )
    # On a busy machine, the launcher may first report another rank that is late for its call.
    machines.wait(lambda: "rank 3 has not reached this call: it is stopped by a signal" in machines.said(first))
    said = machines.said(first)
    assert "ranks 0-2 wait in all_reduce(float32, 4) call 12 (worker.py:9)" in said
    assert "has not reached this call" not in machines.said(second)


LEAVING = """
import sys
import torch, paceline as dist
dist.init_process_group()
for step in range(20):
    if step == 10 and dist.get_rank() == 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(4))
"""


def test_an_early_exit_of_a_machines_only_rank_is_told_first(machines):
    machines.script.write_text(LEAVING)
    place = ("--nnodes=2", "--master-addr", ipv4(0), "--master-port=29400", "--no-pin", "--shutdown-timeout=1")
    first, _ = (machines.start(host, *place, "--node-rank", str(host), str(machines.script)) for host in range(2))
    machines.wait(lambda: first.poll() is not None)
    said = machines.said(first)
    exit_at = f"(sys.exit or SystemExit at {machines.script.name}:7)"
    cause = f"rank 1 exited too early, with exit code 0 {exit_at} after all_reduce(float32, 4) call "
    assert 0 < said.index(cause) < said.index("rank 0 failed because of another rank")
