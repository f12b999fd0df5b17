"""Tests `srun paceline run` and the batch script of `paceline launch-script slurm` on a Slurm cluster."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.fixture import skip_where_not_permitted
from launching import ENVIRONMENT

from clusters import slurm
from clusters.programs import missing_of_slurm

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(600)]

REDUCES = """
import os
import torch
import paceline as dist
dist.init_process_group()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename} has {total.item()}", flush=True)
dist.destroy_process_group()
"""

STEPS = 60
TRAINS = f"""
import os, sys, time
import torch
import paceline as dist

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

dist.init_process_group()
rank, directory, state = dist.get_rank(), sys.argv[1], Sum()

def log(*words):
    if rank == 0:
        with open(f"{{directory}}/steps", "a") as file:
            print(*words, file=file, flush=True)

with dist.CheckpointManager(f"{{directory}}/checkpoints", every=1, keep=3) as manager:
    step = manager.restore({{"sum": state}}) or 0
    log("begins", step, os.environ["SLURM_JOB_NODELIST"], os.environ.get("SLURM_RESTART_COUNT", "0"))
    while step < {STEPS}:
        step += 1
        part = torch.tensor(float(step * (rank + 1)), dtype=torch.float64)
        dist.all_reduce(part)
        state.total += part
        manager.save(step, {{"sum": state}})
        log("step", step, state.total.item())
        time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    if reason := missing_of_slurm():
        pytest.skip(reason)
    skip_where_not_permitted()
    with slurm.Cluster(3) as made:
        yield made


def write(cluster: slurm.Cluster, name: str, text: str) -> str:
    path = cluster.directory / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("tasks", "command"),
    [
        (1, ["paceline", "run", "--nproc-per-node", "2"]),
        (2, ["paceline", "run"]),
        (2, [sys.executable]),
    ],
    ids=["a launcher a machine", "a launcher a rank", "no launcher"],
)
def test_two_nodes_with_two_ranks_each_reduce(cluster, tasks, command):
    path = write(cluster, "reduces.py", REDUCES)
    # Without a launcher, the ranks have no shared secret.
    more = {} if "paceline" in command else {"PACELINE_SECRET": secrets.token_hex(32)}
    done = cluster.run("srun", "--nodes=2", f"--ntasks-per-node={tasks}", *command, path, **more)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank \d of 4 on h\d has [\d.]+", done.stdout))
    assert said == [f"rank {rank} of 4 on h{1 + rank // 2} has 10.0" for rank in range(4)], done.stdout
    assert not list(cluster.directory.glob(".paceline-secret*"))


def batch_script(cluster: slurm.Cluster, *arguments: str) -> str:
    flags = ["--nodes=2", "--gpus=0", "--cpus=2", "--nproc-per-node=2", "--name=sums"]
    words = [sys.executable, "-m", "paceline", "launch-script", "slurm", *flags, *arguments]
    printed = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60, env=ENVIRONMENT).stdout
    return write(cluster, "sums.sbatch", printed)


def submit(cluster: slurm.Cluster, directory: Path) -> str:
    """Submits the batch script, and returns the job's ID."""
    directory.mkdir()
    path = batch_script(cluster, write(cluster, "trains.py", TRAINS), str(directory))
    done = cluster.run("sbatch", "--parsable", f"--output={cluster.directory}/{directory.name}.log", path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lines_of(directory: Path, word: str) -> list[list[str]]:
    """Returns the lines of the job's output that begin with `word`, without the word."""
    path = directory / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.startswith(f"{word} ")]


EXPECTED = f"{10.0 * STEPS * (STEPS + 1) / 2}"


def test_the_batch_script_runs_to_its_end(cluster):
    directory = cluster.directory / "undisturbed"
    job = submit(cluster, directory)
    cluster.wait(lambda: cluster.state_of(job) == "COMPLETED", 180)
    assert [line[0] for line in lines_of(directory, "begins")] == ["0"]
    assert lines_of(directory, "step")[-1] == [str(STEPS), EXPECTED]


@pytest.mark.parametrize(
    ("lost", "silently"),
    [(2, True), (1, True), (2, False)],
    ids=["a node without power", "the node of the batch script", "a killed node"],
)
def test_a_job_whose_node_is_lost_goes_on_elsewhere(lost, silently):
    """Slurm requeues the job, which resumes from its newest checkpoint."""
    if reason := missing_of_slurm():
        pytest.skip(reason)
    skip_where_not_permitted()
    with slurm.Cluster(3) as cluster:
        directory = cluster.directory / "disturbed"
        job = submit(cluster, directory)
        cluster.wait(lambda: len(lines_of(directory, "step")) >= 5, 120)
        cluster.lose(lost, silently)
        cluster.wait(lambda: cluster.state_of(job) == "COMPLETED", 420)
        first, *_, last = lines_of(directory, "begins")
        assert first == ["0", "h[1-2]", "0"]
        assert int(last[0]) >= 4 and last[1] == ("h[1,3]" if lost == 2 else "h[2-3]") and int(last[2]) >= 1
        assert lines_of(directory, "step")[-1] == [str(STEPS), EXPECTED]
