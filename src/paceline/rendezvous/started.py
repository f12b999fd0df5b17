"""Lets ranks meet that a scheduler started without a launcher, as `mpirun -n 2 python train.py` and srun do.

Ranks of one machine meet in a file of their user, so no port can be taken by somebody else; ranks of several machines
meet at the address of rank 0.
"""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import quote

from paceline.rendezvous.schedulers import Scheduler, detect
from paceline.security.own_files import own_directory
from paceline.store.base import Store
from paceline.store.file import FileStore

_RANK_BY_PMI = b"PMI_RANK="
_PARENT, _START_TIME = 1, 19  # among the fields of /proc/PID/stat behind the program's name


def started_by() -> Scheduler | None:
    """Returns the scheduler that started this process as one of several ranks; None if there is none."""
    found = detect(os.environ)
    return found if found is not None and found.starts_ranks else None


def open_store(scheduler: Scheduler, world_size: int, timeout: timedelta) -> Store:
    """Opens the store in which the ranks meet.

    Raises:
        ValueError: nobody knows where rank 0 is.
        StoreConnectionError: nobody serves the store.
        RendezvousError: other users have access to the directory for such stores.
    """
    if scheduler.is_one_machine:
        name = quote(scheduler.job or _starter(), safe="")
        return FileStore(os.path.join(own_directory(), name), world_size, timeout)
    if scheduler.address is None or scheduler.port is None:
        raise ValueError(
            f"{scheduler.name} started rank {scheduler.node_rank} of {scheduler.nodes}, but its variables do not say "
            "where rank 0 is; set MASTER_ADDR to the address of its machine, the same on every rank "
            "(`mpirun -x MASTER_ADDR` of Open MPI, `mpiexec -genv` of MPICH)"
        )
    from paceline.rendezvous.tcp import serve_or_connect

    return serve_or_connect(scheduler.address, scheduler.port, scheduler.node_rank, world_size, timeout)


def _starter() -> str:
    """Returns the process that started all ranks of this machine, and when it was started itself.

    It is the nearest ancestor that is no rank: each rank may be a child of a shell or a wrapper of its own.
    """
    process = os.getpid()
    while True:
        fields = _fields(process)
        parent = int(fields[_PARENT])
        try:
            with open(f"/proc/{parent}/environ", "rb") as file:
                is_rank = any(each.startswith(_RANK_BY_PMI) for each in file.read().split(b"\0"))
        except OSError:  # another user's
            is_rank = False
        if not is_rank:
            return f"{parent}-{_fields(parent)[_START_TIME]}"
        process = parent


def _fields(process: int) -> list[str]:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()
