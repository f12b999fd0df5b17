"""Stores for the rendezvous of ranks without a Paceline launcher.

The stores serve

- the addresses `tcp://host:port` and `file:///path`, with `?rank=..&world_size=..` for this process;
- ranks that a scheduler started, for instance with `mpirun -n 2 python train.py` or srun. On one machine these ranks
  use a file that belongs to their user, since another program could occupy a port; on several machines they use a
  server at the address of rank 0;
- ranks under torchrun, whose own TCPStore occupies MASTER_PORT. These ranks must be on one machine, and use a file.
"""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from paceline.comm.rendezvous.check_in import close_stores_now
from paceline.comm.rendezvous.schedulers import Scheduler, detect
from paceline.comm.security.own_files import own_directory
from paceline.comm.store.file_store import FileStore
from paceline.comm.store.store import Store
from paceline.comm.store.tcp_store import PortInUseError, TCPStore
from paceline.durations import whole_number
from paceline.errors import PacelineError
from paceline.linux import process_fields

_RANK_BY_PMI = b"PMI_RANK="
_PARENT, _START_TIME = 1, 19  # indices among the fields of /proc/PID/stat that follow the program's name
_ANOTHER_RANK_0 = timedelta(seconds=5)


def scheduler_of_process() -> Scheduler | None:
    """Returns the scheduler that started this process as one of several ranks, or None if there is none."""
    found = detect(os.environ)
    return found if found is not None and found.starts_ranks else None


def open_scheduler_store(scheduler: Scheduler, world_size: int, timeout: timedelta) -> Store:
    """Opens the store for the rendezvous of ranks that a scheduler started.

    Raises a ValueError if the scheduler's variables do not contain rank 0's address.
    """
    if scheduler.is_one_machine:
        name = quote(scheduler.job or _starter(), safe="")
        return FileStore(os.path.join(own_directory(), name), world_size, timeout)
    if scheduler.address is None or scheduler.port is None:
        raise ValueError(
            f"{scheduler.name} started rank {scheduler.node_rank} of {scheduler.nodes}, but its variables do not "
            "contain rank 0's address; set MASTER_ADDR to the address of its machine, the same on every rank (`mpirun "
            "-x MASTER_ADDR` of Open MPI, `mpiexec -genv` of MPICH)"
        )
    return serve_or_connect(scheduler.address, scheduler.port, scheduler.node_rank, world_size, timeout)


def _starter() -> str:
    """Returns the process id and start time of the process that started all ranks on this machine.

    This process is the nearest ancestor that does not belong to a single rank. A rank's parent may be a shell or a
    wrapper for this rank alone.
    """
    process = os.getpid()
    while True:
        fields = process_fields(process)
        parent = int(fields[_PARENT])
        try:
            with open(f"/proc/{parent}/environ", "rb") as file:
                is_rank = any(variable.startswith(_RANK_BY_PMI) for variable in file.read().split(b"\0"))
        except OSError:  # the process belongs to another user
            is_rank = False
        if not is_rank:
            return f"{parent}-{process_fields(parent)[_START_TIME]}"
        process = parent


def serve_or_connect(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Serves a store on rank 0, or raises a PortInUseError; connects to the store on the other ranks."""

    def connect(serve: bool, within: timedelta) -> Store:
        store = TCPStore(host, port, world_size, serve, within, wait_for_workers=False)
        store.set_timeout(timeout)
        return store

    if rank != 0:
        return connect(False, timeout)
    close_stores_now()
    try:
        return connect(True, timeout)
    except PortInUseError as error:
        # Another process that was also started as rank 0 may already be serving a store on this port. If this process
        # joins that store, the check-in reports the duplicate rank on all ranks.
        try:
            return connect(False, min(timeout, _ANOTHER_RANK_0))
        except (PacelineError, OSError):
            raise error from None


def open_torchrun_store(port: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store for the ranks that torchrun started on this machine.

    Raises a ValueError if torchrun also started ranks on other machines.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise ValueError(
            "torchrun holds MASTER_PORT for its own store, so it cannot be used for a rendezvous across machines; pass "
            "init_method='tcp://host:port' with another port"
        )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = quote(f"{run}-{port}-{attempt}", safe="")
    return FileStore(os.path.join(own_directory(), name), world_size, timeout)


def rank_and_world_size_in_url(url: str, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the rank and the world size. If an argument is -1, its value is read from the URL.

    Raises a ValueError if the URL lacks such a value, or if the value is not a whole number.
    """
    split = urlsplit(url)
    query = parse_qs(split.query)
    if rank < 0 and "rank" in query:
        rank = _whole(query["rank"][0], "rank", split)
    if world_size < 0 and "world_size" in query:
        world_size = _whole(query["world_size"][0], "world_size", split)
    if rank < 0 or world_size < 0:
        missing = " and ".join(name for name, value in (("rank", rank), ("world_size", world_size)) if value < 0)
        raise ValueError(
            f"{split.scheme}:// needs {missing} as arguments of init_process_group; it has no other source"
        )
    return rank, world_size


def _whole(value: str, name: str, split: SplitResult) -> int:
    number = whole_number(value)
    if number is None:
        raise ValueError(f"{name} in {split.geturl()!r} is {value!r}; it must be a whole number of at least 0")
    return number


def open_store_at_url(url: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store at a tcp:// or file:// address; raises a ValueError if the address is incomplete."""
    split = urlsplit(url)
    if split.scheme == "file":
        if split.netloc or not split.path:
            raise ValueError(f"{url!r} must contain an absolute path after three slashes: file:///shared/path")
        return FileStore(unquote(split.path), world_size, timeout)
    try:
        host, port = split.hostname, split.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if not host or not port:
        raise ValueError(f"{url!r} must contain rank 0's host and a port: tcp://host:port, tcp://[::1]:port for IPv6")
    return serve_or_connect(host, port, rank, world_size, timeout)
