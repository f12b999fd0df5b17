"""Decides the variables of a worker's environment: its ranks, ports and threads, and what it takes over."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline import _core
from paceline.one_port.choice import GATE_VARIABLE as GATE
from paceline.one_port.choice import VARIABLE as PORT
from paceline.record.memory import HANDED_VARIABLE as RECORD_FD
from paceline.rendezvous.environment import STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE
from paceline.security.inherited import VARIABLE as SECRET_FD

# Variables of the job around this launcher, if a worker started it; the launcher's own workers must not use them.
_NOT_PASSED_ON = (
    "PACELINE_SECRET",
    "PACELINE_SECRET_FILE",
    SECRET_FD,
    STORE,
    TORCH_STORE,
    TORCH_STORE_REQUESTS,
    USES_TORCH_STORE,
    "PACELINE_COPIES",
    "PACELINE_TERMINAL",
    "PACELINE_ELASTIC_FD",
    "PACELINE_WORKER",
    PORT,
    GATE,
    RECORD_FD,
)


@dataclass(frozen=True)
class Place:
    """A worker's ranks, by torchrun's names."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role_rank: int | None = None  # the same as the rank, unless there are several roles
    role_world_size: int | None = None
    role: str = "default"


def place_variables(
    place: Place, master: tuple[str, int], run_id: str, restart_count: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """Returns torchrun's variables for a worker."""
    role_rank = place.rank if place.role_rank is None else place.role_rank
    role_world_size = place.world_size if place.role_world_size is None else place.role_world_size
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "NODE_RANK": str(place.group_rank),
        "ROLE_RANK": str(role_rank),
        "ROLE_WORLD_SIZE": str(role_world_size),
        "ROLE_NAME": place.role,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
    }


def worker_environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """Returns torchrun's variables for one of `world_size` workers of this machine."""
    return place_variables(Place(rank, world_size, rank, world_size), ("127.0.0.1", port), run_id)


def inherited(base: Mapping[str, str]) -> dict[str, str]:
    """Returns what workers take over of their launcher's variables, and the defaults for those that it lacks."""
    defaults = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # the latter as torchrun
    return defaults | {name: value for name, value in base.items() if name not in _NOT_PASSED_ON}


def allowed_cores() -> int:
    """Returns how many cores this process may use, by affinity and by its cgroup's quota; at least 1."""
    return _core.usable_cores()


def cpu_quota() -> float | None:
    """Returns how many cores' time this process's cgroup gets, in version 2 or 1; None for no limit."""
    return _core.cpu_quota()[0] or None


def threads_per_worker(cores: int, workers: int, environment: Mapping[str, str]) -> int | None:
    """Returns the OMP_NUM_THREADS that divides the cores among the workers; None if the user has set it."""
    return None if "OMP_NUM_THREADS" in environment else max(1, cores // workers)


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port that is free now at one of this machine's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
