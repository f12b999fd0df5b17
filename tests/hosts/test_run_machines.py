"""`paceline run` on several machines, which are numbered, join in any order, use a token, leave, or are lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hosts.machines import Machines
from hosts.network import ipv4

SOON_S = 20.0  # shorter than any rendezvous timeout, much longer than a rendezvous takes


def by_number(here: Machines, host: int, *arguments: str, nodes: int = 2):
    place = ("--nnodes", str(nodes), "--node-rank", str(host), "--master-addr", ipv4(0), "--master-port", "29400")
    return here.start(host, *place, *arguments)


def test_numbered_machines_count_ranks_through(machines):
    here = machines(2)
    second = by_number(here, 1, "--nproc-per-node=2", str(here.script), str(here.directory))
    first = by_number(here, 0, "--nproc-per-node=1", str(here.script), str(here.directory))
    here.wait_for(3)
    here.say("end")
    here.expect(first, 0)
    here.expect(second, 0)
    places = sorted((line[3], line[1], line[5], line[6], line[7]) for line in here.log())
    address = ipv4(0)
    assert places == [("0", "h0", "0", "0", address), ("1", "h1", "0", "1", address), ("2", "h1", "1", "1", address)]


REDUCES = """
import torch, torch.distributed, paceline
for dist, backend in ((torch.distributed, "gloo"), (paceline, None)):
    dist.init_process_group(backend)
    t = torch.ones(1); dist.all_reduce(t); print(dist.__name__, t.item())
    dist.destroy_process_group()
"""


def test_ranks_of_two_machines_reduce(machines):
    here = machines(2)
    here.script.write_text(REDUCES)
    launchers = [by_number(here, host, str(here.script)) for host in range(2)]
    for launcher in launchers:
        here.expect(launcher, 0)
    said = "".join(here.said(launcher, "out") for launcher in launchers)
    names = ("paceline", "torch.distributed")
    assert sorted(said.splitlines()) == [f"[rank {rank}] {name} 2.0" for rank in range(2) for name in names]


def test_a_failure_on_one_machine_restarts_all_of_them(machines):
    here = machines(2)
    launchers = [here.elastic(host, "2", "--max-restarts=1") for host in range(2)]
    here.wait_for(2)
    here.say("fail1")
    here.wait_for(2, generations=2)
    (host,) = (line[1] for line in here.log() if line[2] == "1" and line[3] == "0")
    here.say("fail0")
    for launcher in launchers:
        here.expect(launcher, 1)
        said = here.said(launcher)
        assert "restart 1 of 1 in 0.25 s: rank 1 failed" in said
        has_printed_it = "[rank 0] ValueError: told to fail" in said
        end = "ValueError: told to fail; its traceback is above" if has_printed_it else "ValueError: told to fail"
        assert said.rstrip().endswith(end)
        assert f"rank 0 failed first ({host}, pid" in said


def test_a_newcomer_gets_a_place_at_once(machines):
    here = machines(3)
    first = here.elastic(1, "2:3")  # this machine starts before the serving machine
    serving = here.elastic(0, "2:3")
    here.wait_for(2)
    last = here.elastic(2, "2:3")
    here.wait(lambda: "joins" in here.said(serving))
    joined_s = time.time()
    formed_s = here.wait_for(3)
    assert formed_s - joined_s < SOON_S
    assert {line[2] for line in here.log()} == {"0"}, "a newcomer is no restart"
    here.say("end")
    for launcher in (first, serving, last):
        here.expect(launcher, 0)


def test_a_killed_launcher_is_noticed_and_the_others_go_on(machines):
    here = machines(3)
    launchers = [here.elastic(host, "1:3", "--max-restarts=0") for host in range(3)]
    here.wait_for(3)
    killed_s = time.time()
    launchers[2].kill()
    formed_s = here.wait_for(2)
    assert formed_s - killed_s < SOON_S
    here.wait(lambda: "was lost: " in here.said(launchers[1]))
    here.say("end")
    here.expect(launchers[0], 0)
    here.expect(launchers[1], 0)


def test_a_silent_machine_is_noticed_soon(machines):
    here = machines(3, bridged=True)
    launchers = [here.elastic(host, "2:3") for host in range(3)]
    here.wait_for(3)
    cut_s = time.time()
    here.network.cut_host(2)
    formed_s = here.wait_for(2)
    assert formed_s - cut_s < SOON_S, "noticed, and the others at work again"
    here.wait(lambda: "nothing was received from it for" in here.said(launchers[0]))
    here.expect(launchers[2], 1)
    assert "which hosts the rendezvous, was lost: nothing was received from it for" in here.said(launchers[2])
    here.say("end")
    here.expect(launchers[0], 0)
    here.expect(launchers[1], 0)


def test_a_machine_that_hears_nobody_suspects_itself(machines):
    here = machines(3, bridged=True)
    launchers = [here.elastic(host, "2:3") for host in range(3)]
    here.wait_for(3)
    here.network.cut_host(0)
    here.wait(lambda: "nor from any other machine: " in here.said(launchers[0]))
    assert "which hosts the rendezvous, may be the one that is cut off" in here.said(launchers[0])
    for launcher in launchers[1:]:
        here.expect(launcher, 1)
    launchers[0].kill()


LEAVES = """
import os, time
import paceline, torch, torch.distributed as dist
paceline.init_process_group()
dist.init_process_group("gloo")
dist.barrier()  # gloo's connections fail on a rank that is still making them when another rank exits
mine, pair = dist.new_group([0]), dist.new_group([1, 2])
if dist.get_rank() == 0:
    os._exit(0)
time.sleep(2)
again = dist.new_group([1, 2], use_local_synchronization=True)
for group in (pair, again):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    print("pair", t.item())
os._exit(0)
"""


def test_the_stores_of_several_machines_outlive_rank_0(machines):
    here = machines(2)
    here.script.write_text(LEAVES)
    launchers = [by_number(here, 0, "--nproc-per-node=2", str(here.script)), by_number(here, 1, str(here.script))]
    for launcher in launchers:
        here.expect(launcher, 0)
    said = "".join(here.said(launcher, "out") for launcher in launchers)
    assert sorted(said.splitlines()) == [f"[rank {rank}] pair 2.0" for rank in (1, 2) for _ in range(2)]


def test_a_spare_machine_replaces_one_that_is_stopped(machines):
    here = machines(3)
    serving, leaving = here.elastic(0, "1:2"), here.elastic(1, "1:2")
    here.wait_for(2)
    spare = here.elastic(2, "1:2")
    here.wait(lambda: "waits until one leaves" in here.said(spare))
    leaving.send_signal(signal.SIGTERM)
    here.expect(leaving, 1)
    here.wait_for(2, generations=2)
    assert {line[1] for line in here.log()[-2:]} == {"h0", "h2"}
    here.say("end")
    here.expect(serving, 0)
    here.expect(spare, 0)


def test_when_the_serving_machine_is_stopped_all_end(machines):
    here = machines(2)
    serving, other = here.elastic(0, "2"), here.elastic(1, "2")
    here.wait_for(2)
    serving.send_signal(signal.SIGINT)
    here.expect(serving, 1)
    here.expect(other, 1)
    assert "h0 was stopped (SIGINT)" in here.said(other)


def test_the_others_end_when_the_serving_launcher_is_killed(machines):
    here = machines(2)
    serving, other = here.elastic(0, "2"), here.elastic(1, "2")
    here.wait_for(2)
    killed_s = time.time()
    serving.kill()
    here.expect(other, 1)
    assert time.time() - killed_s < SOON_S
    assert f"the launcher at {ipv4(0)}:29400, which hosts the rendezvous, was lost: " in here.said(other)


def command_lines() -> Iterator[str]:
    """Yields the command lines of all processes, which every user of the machine can read."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has exited
            yield path.read_text(errors="replace")


def test_a_token_is_all_that_another_machine_needs(machines):
    here = machines(2)
    words = (str(here.script), str(here.directory))
    serving = here.start(0, "--print-token", "--nnodes=2", "--master-addr", ipv4(0), *words, secret=None)
    here.wait(lambda: here.said(serving, "out").endswith("\n"))
    verb, join, dash, *rest, token = here.said(serving, "out").split()
    assert (verb, join, dash, rest) == ("paceline", "join", "-", list(words))
    other = here.start(1, "-", "--nproc-per-node=2", *rest, secret=None, verb="join", says=token)
    here.wait_for(3)
    assert "join\0-\0" in Path(f"/proc/{other.pid}/cmdline").read_text()
    assert not any(token in text for text in command_lines())
    here.say("end")
    here.expect(serving, 0)
    here.expect(other, 0)


def test_without_a_secret_no_rendezvous_is_served_to_others(machines):
    here = machines(2)
    launcher = by_number(here, 0, str(here.script), str(here.directory))
    bare = here.start(1, "--nnodes=2", "--node-rank=0", "--master-addr", ipv4(1), str(here.script), secret=None)
    here.expect(bare, 2)
    assert "this job has no secret, so anybody could join it" in here.said(bare)
    launcher.kill()


def test_another_jobs_launcher_is_refused(machines):
    here = machines(2)
    serving = here.elastic(0, "2")
    stranger = here.start(1, "--nnodes=2", "--rdzv-endpoint", f"{ipv4(0)}:29400", str(here.script), secret="x" * 32)
    here.expect(stranger, 1)
    assert "does not hold this job's secret" in here.said(stranger)
    assert serving.poll() is None


def test_nobody_served_the_rendezvous(machines):
    here = machines(1)
    launcher = here.start(
        0, "--nnodes=2", "--rdzv-endpoint=10.77.0.9:29400", "--rdzv-conf=is_host=0,join_timeout=2", str(here.script)
    )
    here.expect(launcher, 1)
    said = here.said(launcher)
    assert "waiting up to 2 s for a launcher at 10.77.0.9:29400 (" in said
    assert "no launcher hosted the rendezvous at 10.77.0.9:29400 for 2 s" in said


def test_under_slurm_machines_meet_without_flags(machines):
    here = machines(2)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "10.77.0.[1-2]"}
    words = ("--nproc-per-node=2", str(here.script), str(here.directory))
    launchers = [here.start(host, *words, more={**step, "SLURM_PROCID": str(host)}) for host in range(2)]
    here.wait_for(4)
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
    assert "found Slurm: launcher 0 of 2, with the rendezvous at 10.77.0.1" in here.said(launchers[0])


def test_mpirun_gives_each_rank_a_launcher_and_a_local_rank(machines):
    here = machines(2)
    words = (str(here.script), str(here.directory))
    for rank in range(4):
        place = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.77.0.1:4444",
        }
        here.start(rank // 2, *words, more=place)
    here.wait_for(4)
    assert sorted((line[3], line[1], line[5]) for line in here.log()) == [
        ("0", "h0", "0"),
        ("1", "h0", "1"),
        ("2", "h1", "0"),
        ("3", "h1", "1"),
    ]


def test_doctors_of_two_machines_examine_the_path_between_them(machines):
    here = machines(2)
    listening = here.start(0, "--listen", ipv4(0), verb="doctor", secret=None)
    here.wait(lambda: here.said(listening, "out").endswith("\n"))
    token = here.said(listening, "out").split()[-1]
    visiting = here.start(1, "--peer", "-", verb="doctor", secret=None, says=token)
    here.expect(visiting, 0)
    here.expect(listening, 0)
    assert "3 MiB each way at" in here.said(visiting, "out")
    assert "10.77.0.2 can be reached too" in here.said(listening, "out")


def test_the_address_for_the_others_can_be_chosen(machines):
    here = machines(2)
    chosen = {"h0": "fd77::1", "h1": "fd77::2"}
    serving, other = (here.elastic(at, "2", "--local-addr", chosen[f"h{at}"]) for at in range(2))
    here.wait_for(2)
    (first,) = (line[1] for line in here.log() if line[3] == "0")  # either machine may join first
    assert {line[7] for line in here.log()} == {chosen[first]}
    here.say("end")
    here.expect(serving, 0)
    here.expect(other, 0)


def by_slurm(here: Machines, host: int, *arguments: str):
    """Runs as a task of `srun --nodes=2`, with Slurm's variables and without a secret."""
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_START_TIME": "1700000000",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(host),
        "SLURM_NODEID": str(host),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": f"{ipv4(0)},{ipv4(1)}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_SUBMIT_DIR": str(here.directory),
        "HOME": str(here.directory),
    }
    return here.start(host, *arguments, secret=None, more=step)


MEETS = """
import contextlib
from paceline.comm.rendezvous.rendezvous import rendezvous
met = rendezvous(None, None, -1, -1, 100)
print("met", met.world_size, flush=True)
if met.rank == 0:
    met.store.wait(["the other has met"])  # whose store ends with this process
else:
    with contextlib.suppress(OSError, RuntimeError):
        met.store.set("the other has met", b"")
"""


def test_under_slurm_the_job_makes_its_own_secret(machines):
    here = machines(2)
    (here.directory / "meet.py").write_text(MEETS)
    launchers = [by_slurm(here, host, str(here.directory / "meet.py")) for host in (1, 0)]
    for launcher in launchers:
        here.expect(launcher, 0)
        assert "met 2" in here.said(launcher, "out")
    assert not list(here.directory.glob(".paceline-secret*"))


def test_the_file_with_slurms_secret_is_gone_once_all_came(machines):
    here = machines(2)
    first = by_slurm(here, 0, str(here.script), str(here.directory))
    here.wait(lambda: bool(list(here.directory.glob(".paceline-secret*"))))
    second = by_slurm(here, 1, str(here.script), str(here.directory))
    here.wait_for(2)
    here.wait(lambda: not list(here.directory.glob(".paceline-secret*")))
    here.say("end")
    here.expect(first, 0)
    here.expect(second, 0)
