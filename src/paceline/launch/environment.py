"""What a worker finds in its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def worker_environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """torchrun's variables for one of `world_size` workers of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def allowed_cores() -> int:
    """The cores this process may use, by affinity and by its cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def threads_per_worker(cores: int, workers: int, environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS that shares the cores out; None where the user has chosen."""
    return None if "OMP_NUM_THREADS" in environment else max(1, cores // workers)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
