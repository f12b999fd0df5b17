"""Rank, world size and store for `env://`, from the variables set by `paceline run`, torchrun and other launchers.

If these variables are not set, the variables of mpirun or srun are used.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from paceline.comm.security.secret import job_secret
from paceline.comm.store.remote_store import connect_unix
from paceline.comm.store.store import Store
from paceline.durations import whole_number
from paceline.linux import has_children

STORE = "PACELINE_STORE"  # the launcher's store
TORCH_STORE = "PACELINE_TORCH_STORE"  # host:port of the launcher's store for torch.distributed
TORCH_STORE_REQUESTS = "PACELINE_TORCH_STORE_REQUESTS"  # named pipe for requesting the store at TORCH_STORE
USES_TORCH_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun: True if it serves the store on MASTER_PORT


def rank_and_world_size(rank: int, world_size: int) -> tuple[int, int]:
    """Returns the rank and the world size; -1 is replaced by the value from RANK, WORLD_SIZE or the scheduler.

    Raises:
        ValueError: a variable is missing or is not an integer, or the launcher has started fewer ranks than the world
            size.
        RuntimeError: multiprocessing imports a rank's script in this process; see `check_not_importing`.
    """
    if _is_without_launcher():
        from paceline.comm.rendezvous.shared_store import scheduler_of_process

        scheduler = scheduler_of_process()
        if scheduler is not None and scheduler.nodes is not None:
            return rank if rank >= 0 else scheduler.node_rank, world_size if world_size >= 0 else scheduler.nodes
    if rank < 0:
        rank = _number("RANK", "rank")
        check_not_importing(f"rank {rank}")
    if world_size < 0:
        return rank, _number("WORLD_SIZE", "world_size")
    require_started(rank, world_size)
    return rank, world_size


def require_started(rank: int, world_size: int) -> None:
    """Raises an error if the launcher has started fewer ranks than `world_size`.

    A worker may start further ranks itself, as `torch.multiprocessing.spawn` does. The check therefore requires that
    this process has the rank that the launcher assigned to it, that multiprocessing has not started it, and that it has
    no child processes.
    """
    started = whole_number(os.environ.get("WORLD_SIZE", ""))
    is_launched = STORE in os.environ and "PACELINE_ELASTIC_FD" not in os.environ
    if not is_launched or started is None or world_size <= started or os.environ.get("RANK") != str(rank):
        return
    module = sys.modules.get("multiprocessing.process")
    if not has_children() and (module is None or module.parent_process() is None):
        raise ValueError(
            f"rank {rank}: world_size is {world_size}, but the launcher has started {started} "
            f"rank{'s' if started != 1 else ''} (WORLD_SIZE); leave the argument world_size out, or start {world_size} "
            "ranks with --nproc-per-node"
        )


def check_not_importing(worker: str) -> None:
    """Raises a RuntimeError if multiprocessing has started this process and it is importing the worker's script.

    A process that multiprocessing starts with the method `spawn` or `forkserver` imports the main script of its parent
    and inherits its environment, so it is not the worker that the environment describes.
    """
    module = sys.modules.get("multiprocessing.process")
    if module is not None and getattr(module.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"{worker}: the script runs again in process {os.getpid()}, which multiprocessing started and which "
            'imports the script. Put the code that trains in `if __name__ == "__main__":`. Processes import the script '
            "with the start methods spawn and forkserver; since Python 3.14, forkserver is the default on Linux, also "
            'for the workers of a DataLoader, which accepts multiprocessing_context="fork"'
        )


def open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the launcher's store, rank 0's store at MASTER_ADDR:MASTER_PORT, or the store for a scheduler's ranks.

    Raises a ValueError if a variable is missing or malformed.
    """
    served = os.environ.get(STORE)
    if served is not None:
        return open_store_at(served, timeout)
    from paceline.comm.rendezvous import shared_store

    if _is_without_launcher() and "MASTER_ADDR" not in os.environ:
        scheduler = shared_store.scheduler_of_process()
        if scheduler is not None and (rank, world_size) == (scheduler.node_rank, scheduler.nodes):
            return shared_store.open_scheduler_store(scheduler, world_size, timeout)
    host = _variable("MASTER_ADDR")
    port = _number("MASTER_PORT", "init_method='tcp://host:port'")
    if os.environ.get(USES_TORCH_STORE) == "True":
        return shared_store.open_torchrun_store(port, world_size, timeout)
    return shared_store.serve_or_connect(host, port, rank, world_size, timeout)


def open_store_at(served: str, timeout: timedelta) -> Store:
    """Opens a store served by a launcher on this machine or, in an elastic job, on another machine.

    `served` has the format of PACELINE_STORE. Raises a ValueError if it is malformed.
    """
    kind, _, place = served.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix":
        return connect_unix(place, job_secret(), timeout)
    number = whole_number(port, most=65535)
    if kind == "tcp" and host and number is not None:
        from paceline.comm.store.tcp_store import TCPStore

        return TCPStore(host.strip("[]"), number, timeout=timeout, wait_for_workers=False)
    raise ValueError(f"{STORE} is {served!r}; it must be unix:PATH or tcp:HOST:PORT, as `paceline run` sets it")


def is_torch_store(port: int) -> bool:
    """Returns True if the launcher serves torch's store on `port`, in which case no rank can use this port."""
    return os.environ.get(TORCH_STORE, "").rpartition(":")[2] == str(port)


def is_served_by_launcher(url: str) -> bool:
    """Returns True if the URL's port is MASTER_PORT and is already used by the launcher's store."""
    from urllib.parse import urlsplit

    try:
        port = urlsplit(url).port
    except ValueError:
        return False
    return port is not None and STORE in os.environ and is_torch_store(port)


def _is_without_launcher() -> bool:
    """Returns True if no launcher has set this process's rank; a scheduler's variables are then used."""
    return {"RANK", "WORLD_SIZE"}.isdisjoint(os.environ)


def _number(variable: str, argument: str) -> int:
    value = _variable(variable, f", or pass {argument}= to init_process_group")
    number = whole_number(value.strip())
    if number is None:
        raise ValueError(
            f"the environment variable {variable} is {value[:100]!r}; it must be a whole number of at least 0"
        )
    return number


def _variable(name: str, otherwise: str = "") -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"env:// needs the environment variable {name}, which is not set; start the script with `paceline run`"
            f"{otherwise}"
        )
    return value
