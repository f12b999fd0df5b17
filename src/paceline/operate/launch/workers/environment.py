"""Environment variables for workers: ranks, ports, threads and `--compat`, and validation of PACELINE_* variables.

`--compat torch,horovod` only sets environment variables, so it also affects a script's subprocesses, such as those
started by mp.spawn. PACELINE_* variables are checked before any worker starts, because an invalid value would terminate
every worker. The module that reads a variable also checks its value, and is imported only if the variable is set.
"""

from __future__ import annotations

import os
import socket
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from paceline import _core
from paceline.comm.one_port.dialer import GATE_VARIABLE as GATE
from paceline.comm.one_port.dialer import PORT_VARIABLE as PORT
from paceline.comm.one_port.dialer import chosen_port
from paceline.comm.record.recorder import HANDED_VARIABLE as RECORD_FD
from paceline.comm.rendezvous.environment import STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE
from paceline.comm.security.secret import SECRET_FD_VARIABLE as SECRET_FD
from paceline.comm.security.secret import chosen_level
from paceline.durations import whole_number

COMPAT_VARIABLE = "PACELINE_COMPAT"  # list of libraries; read by the plug-in at the end of `import torch`
_LIBRARIES = ("torch", "horovod")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch does not call the plug-in if this variable is 0
_HOROVODS = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
}
_STAND_IN = Path(__file__).parents[3] / "interop" / "horovod" / "stand_in"  # contains a package `horovod`
# Variables that other launchers set for their workers. Such a worker may have started this launcher.
_OF_WORKERS = {
    *("CGROUP", "COMPAT_REPORTED", "COPIES", "ELASTIC_FD", "ERROR_FILE", "GATE", "JOB", "RECORD_DIR", "RECORD_FD"),
    *("SECRET_FD", "STDIN", "STORE", "TERMINAL", "TORCH_STORE", "TORCH_STORE_REQUESTS", "WORKER"),
}
_NEAR = 0.75
# Variables from an outer job, if a worker started this launcher. This launcher's own workers must not inherit them.
_NOT_PASSED_ON = {
    *("PACELINE_SECRET", "PACELINE_SECRET_FILE", SECRET_FD),
    *(STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE, PORT, GATE),
    *("PACELINE_COPIES", "PACELINE_TERMINAL", "PACELINE_ELASTIC_FD", "PACELINE_WORKER", RECORD_FD),
}


@dataclass(frozen=True)
class WorkerRanks:
    """A worker's ranks, with torchrun's names."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role_rank: int | None = None  # equal to the rank unless there are several roles
    role_world_size: int | None = None
    role: str = "default"


def rank_variables(
    place: WorkerRanks, master: tuple[str, int], run_id: str, restart_count: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """Returns the variables that torchrun sets for a worker."""
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
    """Returns the variables that torchrun sets for one of `world_size` workers on this machine."""
    return rank_variables(WorkerRanks(rank, world_size, rank, world_size), ("127.0.0.1", port), run_id)


def inherited_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that workers inherit from the launcher, with defaults for missing ones."""
    # torchrun also sets TORCH_NCCL_ASYNC_ERROR_HANDLING
    defaults = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return defaults | {name: value for name, value in base.items() if name not in _NOT_PASSED_ON}


def allowed_cores() -> int:
    """Returns the number of cores that this process may use according to its affinity and cgroup quota; at least 1."""
    return _core.usable_cores()


def cpu_quota() -> float | None:
    """Returns the CPU quota of this process's cgroup (version 2 or 1) in cores, or None if there is no limit."""
    return _core.cpu_quota()[0] or None


def threads_per_worker(cores: int, workers: int, environment: Mapping[str, str]) -> int | None:
    """Returns a value for OMP_NUM_THREADS that divides the cores among the workers; None if the user has set one."""
    return None if "OMP_NUM_THREADS" in environment else max(1, cores // workers)


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port that is currently free at one of this machine's addresses."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def parse_libraries(text: str) -> tuple[str, ...]:
    """Parses `torch`, `horovod` or both, separated by a comma."""
    chosen = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in chosen:
        if name not in _LIBRARIES:
            raise ArgumentTypeError(f"{name!r} is not a library that Paceline can replace; use torch or horovod")
    return chosen


def horovod_variables(of_torchrun: Mapping[str, str]) -> dict[str, str]:
    """Converts torchrun's variables to the rank variables set by horovodrun."""
    return {name: of_torchrun[source] for name, source in _HOROVODS.items()}


def compat_variables(chosen: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the additional variables for the selected libraries."""
    variables = {COMPAT_VARIABLE: ",".join(chosen)} if chosen else {}
    if "torch" in chosen:
        variables[_AUTOLOAD] = "1"
    if "horovod" in chosen:
        others = environment.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = str(_STAND_IN) + (os.pathsep + others if others else "")
    return variables


Check = Callable[[str], object]  # raises ValueError for an invalid value


def _from(module: str, name: str, *arguments: object) -> Check:
    """Returns a check that imports a function and calls it with `arguments` and the value."""
    return lambda text: getattr(import_module(module), name)(*arguments, text)


def _compat(text: str) -> None:
    try:
        parse_libraries(text)
    except ArgumentTypeError as error:
        raise ValueError(f"{COMPAT_VARIABLE}: {error}") from None


def _one_of(name: str, *choices: str) -> Check:
    def check(text: str) -> None:
        if text not in choices:
            raise ValueError(f"{name} is {text!r}; it must be {' or '.join(choices)}")

    return check


def _nodes(text: str) -> None:
    if whole_number(text, least=1) is None:
        raise ValueError(f"PACELINE_NODES is {text[:100]!r}; it must be the number of pods")


_SETTINGS = "paceline.comm.engine.network_settings"
_CHECKS: Mapping[str, Check | None] = {  # None: every value is valid
    "PACELINE_ALGORITHM": _from(_SETTINGS, "known_algorithm"),
    "PACELINE_CHECKS": _from("paceline.train.checks.check_settings", "parse_checks"),
    "PACELINE_COMPAT": _compat,
    "PACELINE_COSTS": _from(_SETTINGS, "parse_costs"),
    "PACELINE_FAILPOINTS": _from("paceline.train.elastic.failpoints", "arm", ""),
    "PACELINE_INSECURE": _one_of("PACELINE_INSECURE", "1", "0"),
    "PACELINE_NCCL_SHARED_GPU": None,
    "PACELINE_NETWORK": _from(_SETTINGS, "parse_network"),
    "PACELINE_NODES": _nodes,
    "PACELINE_PORT": lambda _: chosen_port(),
    "PACELINE_RECORD": _one_of("PACELINE_RECORD", "on", "off"),
    "PACELINE_RUNS_DIR": None,
    "PACELINE_SECRET": None,
    "PACELINE_SECRET_FILE": None,
    "PACELINE_SECURITY": lambda _: chosen_level(),
    "PACELINE_STREAMS": _from(_SETTINGS, "parse_streams"),
}
_BETWEEN_MACHINES: Mapping[str, Check | None] = {
    "PACELINE_CONGESTION": _from(_SETTINGS, "require_control"),
    "PACELINE_IFACE": _from(_SETTINGS, "own_address", None),
}


def check_variables(has_other_machines: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Validates the variables that workers read, including those for connections to other machines, if there are any.

    Raises:
        ValueError: a value is invalid; the message contains the variable, its value and the valid values.
    """
    checks = {**_CHECKS, **_BETWEEN_MACHINES} if has_other_machines else _CHECKS
    for name, check in checks.items():
        if check is not None and (text := environment.get(name)):
            check(text)


def misspelled(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yields a sentence for each unknown variable whose name resembles a known one."""
    prefix = "PACELINE_"
    known = {name.removeprefix(prefix) for name in (*_CHECKS, *_BETWEEN_MACHINES)}
    given = {name.removeprefix(prefix) for name in environment if name.startswith(prefix)}
    for word in sorted(given - known - _OF_WORKERS):
        from difflib import get_close_matches

        if near := get_close_matches(word, sorted(known), n=1, cutoff=_NEAR):
            name, meant = prefix + word, prefix + near[0]
            yield f"the environment variable {name} is not known and has no effect; did you mean {meant}?"
