"""The store on the first machine in a scheduler's job."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from paceline.comm.rendezvous import environment


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


def test_tasks_on_two_machines_meet_at_the_first(variables, monkeypatch):
    served: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "paceline.comm.rendezvous.shared_store.serve_or_connect",
        lambda host, port, *_: served.append((host, port)) or "store",
    )
    variables(of_slurm(1, 2, nodes=2))
    assert environment.open_store(1, 2, timedelta(seconds=1)) == "store"
    ((host, port),) = served
    assert host == "h0" and 20000 <= port < 30000
