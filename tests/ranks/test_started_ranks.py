"""Ranks started by mpirun or srun without a launcher connect to each other in `init_process_group()`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from engines import mpirun
from launching import ENVIRONMENT

TRAINS = """
import torch
import paceline as dist
dist.init_process_group()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {total.item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", mpirun.LIBRARIES)
def test_mpirun_starts_ranks_without_a_launcher(script, name):
    library = mpirun.find(name)
    if library is None:
        pytest.skip(f"there is no {name} in this environment; `make test` installs it")
    said = mpirun.run_program(library, 2, [sys.executable, script(TRAINS)], timeout_s=110)
    assert sorted(re.findall(r"rank \d of \d has \d\.\d", said)) == ["rank 0 of 2 has 3.0", "rank 1 of 2 has 3.0"], said


MEETS = """
from paceline.comm.rendezvous.rendezvous import rendezvous
met = rendezvous(None, None, -1, -1, 100)
met.store.set(str(met.rank), b"")
met.store.wait([str(rank) for rank in range(met.world_size)])
print("met", met.rank, met.world_size, flush=True)
"""


def of_slurm(rank: int, tasks: int, nodes: int = 1, **more: str) -> dict[str, str]:
    """Returns the variables of an srun task."""
    return {
        "SLURM_JOB_ID": f"{os.getpid()}",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "h0" if nodes == 1 else f"h[0-{nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks // nodes),
        **more,
    }


def of_pmi(rank: int, size: int) -> dict[str, str]:
    """Returns the variables of a rank that MPICH's mpirun has started."""
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size)}


def ends_of(path: str, variables: list[dict[str, str]], tmp_path) -> list[str]:
    """Starts a process in a separate shell for each set of variables; returns the output of the processes."""
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_STORE")
    base = {name: value for name, value in ENVIRONMENT.items() if name not in unset} | {"TMPDIR": str(tmp_path)}
    words = ["sh", "-c", '"$0" "$1"; exit $?', sys.executable, path]
    ranks = [subprocess.Popen(words, env=base | each, stdout=subprocess.PIPE, text=True) for each in variables]
    try:
        said = [each.communicate(timeout=100)[0].strip() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert [each.returncode for each in ranks] == [0] * len(ranks)
    return said


@pytest.mark.parametrize("of", [of_slurm, of_pmi])
def test_tasks_of_one_machine_meet_in_a_file(script, tmp_path, of):
    assert ends_of(script(MEETS), [of(0, 2), of(1, 2)], tmp_path) == ["met 0 2", "met 1 2"]


def test_two_jobs_of_slurm_on_a_machine_do_not_meet(script, tmp_path):
    jobs = [of_slurm(rank, 2, SLURM_JOB_ID=job) for job in ("7", "8") for rank in range(2)]
    assert sorted(ends_of(script(MEETS), jobs, tmp_path)) == ["met 0 2", "met 0 2", "met 1 2", "met 1 2"]
    assert len(list(tmp_path.glob("paceline-*/*"))) == 2


@pytest.fixture
def variables(monkeypatch):
    """Replaces this process's launcher variables with those of a task."""

    def set_them(values: dict[str, str]) -> None:
        for name in list(os.environ):
            if name.startswith(("PACELINE_", "MASTER_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
                monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_them
