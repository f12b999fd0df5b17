"""Joins the job, and says which rank of how many this process is, on its machine and among the machines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline.group.default import default_group
from paceline.group.init import destroy_process_group, init_process_group
from paceline.group.queries import is_initialized as group_exists
from paceline.horovod.process_sets import ProcessSet, add_process_set, begin, end
from paceline.store.hash import HashStore

_OTHER_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Joins the job that `paceline run` has started; without a launcher this process is a job of its own.

    A second call has no effect, and a default process group that exists already is used.

    Args:
        comm: must be None; process sets do what Horovod does with a list of ranks or an MPI communicator here.
        process_sets: sets of ranks to make groups of; all ranks give the same ones.

    Raises:
        ValueError: `comm` was given, or another launcher has started the ranks, which does not say where they meet.
        RendezvousError: the ranks did not find each other.
    """
    if comm is not None:
        raise ValueError("paceline.horovod.init has no comm; give process_sets=[ProcessSet(ranks)] instead")
    if not group_exists():
        _join()
    begin()
    for each in process_sets or ():
        add_process_set(each)


def _join() -> None:
    if "RANK" in os.environ:
        init_process_group()
        return
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise ValueError(
                f"this process is one of {os.environ[name]} ranks ({name}), whose launcher does not tell Paceline "
                "where they meet; start the script with `paceline run --nproc-per-node N` instead of horovodrun or "
                "mpirun"
            )
    init_process_group(rank=0, world_size=1, store=HashStore())


def shutdown() -> None:
    """Leaves the job; has no effect if this process is in none."""
    if group_exists():
        end()
        destroy_process_group()


def is_initialized() -> bool:
    """Returns whether `init` has been called, and `shutdown` not since."""
    return group_exists()


def rank() -> int:
    """Returns this process's rank."""
    return default_group().rank()


def size() -> int:
    """Returns the number of ranks."""
    return default_group().size()


def local_rank() -> int:
    """Returns this process's number among those of its machine."""
    return _of_launcher("LOCAL_RANK", _on_my_host().index(rank()))


def local_size() -> int:
    """Returns the number of ranks on this machine."""
    return _of_launcher("LOCAL_WORLD_SIZE", len(_on_my_host()))


def cross_rank() -> int:
    """Returns this machine's number."""
    hosts = list(dict.fromkeys(member.host for member in default_group().members))
    return _of_launcher("GROUP_RANK", hosts.index(default_group().members[rank()].host))


def cross_size() -> int:
    """Returns the number of machines."""
    return _of_launcher("GROUP_WORLD_SIZE", len({member.host for member in default_group().members}))


def is_homogeneous() -> bool:
    """Returns whether all machines have the same number of ranks."""
    hosts = [member.host for member in default_group().members]
    return len({hosts.count(host) for host in hosts}) == 1


def _of_launcher(variable: str, otherwise: int) -> int:
    """Returns what the launcher says, if it started this job and not one around it."""
    is_of_this_job = os.environ.get("WORLD_SIZE") == str(size()) and os.environ.get("RANK") == str(rank())
    return int(os.environ[variable]) if is_of_this_job and variable in os.environ else otherwise


def _on_my_host() -> list[int]:
    members = default_group().members
    return [at for at, member in enumerate(members) if member.host == members[rank()].host]


def mpi_threads_supported() -> bool:
    """Returns False, since no MPI is involved."""
    return False


mpi_enabled = mpi_built = mpi_threads_supported


def gloo_built() -> bool:
    """Returns True: tensors on the CPU can be reduced without MPI, which is what scripts ask this for."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Returns 0, as Horovod does where it reduces on the CPU."""
    return 0


ddl_built = ccl_built = nccl_built


def cuda_built() -> bool:
    """Returns False, as Horovod does where it reduces on the CPU."""
    return False


rocm_built = cuda_built
