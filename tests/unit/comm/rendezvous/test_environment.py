"""Rank, world size and address from a scheduler's variables."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta

import pytest

from paceline.comm.rendezvous import environment, shared_store
from paceline.comm.rendezvous.schedulers import detect


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


def test_what_a_launcher_sets_takes_precedence(variables):
    variables(of_slurm(1, 2) | {"RANK": "3", "WORLD_SIZE": "4"})
    assert environment.rank_and_world_size(-1, -1) == (3, 4)
    variables(of_slurm(1, 2))
    assert environment.rank_and_world_size(-1, -1) == (1, 2)


def test_other_ranks_than_the_tasks_need_an_address(variables):
    variables(of_slurm(1, 2))
    with pytest.raises(ValueError, match="MASTER_ADDR, which is not set"):
        environment.open_store(0, 3, timedelta(seconds=1))


def test_ranks_of_several_machines_need_to_know_the_first(variables):
    variables({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    found = detect(os.environ)
    assert found is not None
    with pytest.raises(ValueError, match=r"started rank 1 of 4.*do not contain rank 0's address; set MASTER_ADDR"):
        shared_store.open_scheduler_store(found, 4, timedelta(seconds=1))


def test_a_pod_is_no_rank_by_itself(variables):
    variables({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "PACELINE_NODES": "2"})
    with pytest.raises(ValueError, match="RANK, which is not set"):
        environment.rank_and_world_size(-1, -1)


def test_a_process_that_imports_the_script_is_not_the_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert environment.rank_and_world_size(-1, -1) == (1, 2)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match=r"rank 1: the script runs again in process \d+.*__main__"):
        environment.rank_and_world_size(-1, -1)
    assert environment.rank_and_world_size(0, 2) == (0, 2), "a rank that the program passes is its own"
