"""Initialization, rank queries, process sets (Horovod's term for subgroups) and `run`."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from paceline.comm.group.default import default_group, find_world, get_rank, get_world_size
from paceline.comm.group.default import is_initialized as group_exists
from paceline.comm.group.init import destroy_process_group, init_process_group, new_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.store.store import HashStore
from paceline.durations import whole_number
from paceline.interop.horovod.call_queue import CallQueue
from paceline.operate.launch.spawn import spawn

_OTHER_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Joins the job started by `paceline run`. Without a launcher, creates a job with a single rank.

    Uses the default process group if it already exists. Calling `init` again has no effect.

    Args:
        comm: Must be None; use `process_sets` instead of Horovod's rank lists and MPI communicators.
        process_sets: The process sets to add, the same on all ranks.

    Raises:
        ValueError: `comm` was given, or the ranks were started by a launcher that Paceline does not support.
        RendezvousError: the rendezvous failed.
    """
    if comm is not None:
        raise ValueError("paceline.horovod.init does not support comm; pass process_sets=[ProcessSet(ranks)] instead")
    if find_world() is None:
        _join()
    open_global_process_set()
    for process_set in process_sets or ():
        add_process_set(process_set)


def _join() -> None:
    if "RANK" in os.environ:
        init_process_group()
        return
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise ValueError(
                f"this process is one of {os.environ[name]} ranks ({name}), whose launcher does not provide a "
                "rendezvous address to Paceline; start the script with `paceline run --nproc-per-node N` instead of "
                "horovodrun or mpirun"
            )
    init_process_group(rank=0, world_size=1, store=HashStore())


def shutdown() -> None:
    """Leaves the job. Has no effect if `init` has not been called."""
    if find_world() is not None:
        close_process_sets()
        destroy_process_group()


def is_initialized() -> bool:
    """Returns True if Paceline is initialized: `init` was called, and `shutdown` was not called afterward."""
    return group_exists()


def rank() -> int:
    """Returns this process's rank."""
    return get_rank()


def size() -> int:
    """Returns the number of ranks."""
    return get_world_size()


def local_rank() -> int:
    """Returns this process's rank among the processes on its machine."""
    return _of_launcher("LOCAL_RANK", _on_my_host().index(rank()))


def local_size() -> int:
    """Returns the number of ranks on this machine."""
    return _of_launcher("LOCAL_WORLD_SIZE", len(_on_my_host()))


def cross_rank() -> int:
    """Returns the index of this machine in the job."""
    hosts = list(dict.fromkeys(member.host for member in default_group().members))
    return _of_launcher("GROUP_RANK", hosts.index(default_group().members[rank()].host))


def cross_size() -> int:
    """Returns the number of machines."""
    return _of_launcher("GROUP_WORLD_SIZE", len({member.host for member in default_group().members}))


def is_homogeneous() -> bool:
    """Returns True if all machines have the same number of ranks."""
    hosts = [member.host for member in default_group().members]
    return len({hosts.count(host) for host in hosts}) == 1


def _of_launcher(variable: str, otherwise: int) -> int:
    """Returns the value of the launcher's variable, or `otherwise` if it is not set or belongs to an outer job."""
    is_of_this_job = os.environ.get("WORLD_SIZE") == str(size()) and os.environ.get("RANK") == str(rank())
    number = whole_number(os.environ.get(variable, "")) if is_of_this_job else None
    return otherwise if number is None else number


def _on_my_host() -> list[int]:
    members = default_group().members
    return [number for number, member in enumerate(members) if member.host == members[rank()].host]


def mpi_threads_supported() -> bool:
    """Returns False, because Paceline does not use MPI."""
    return False


mpi_enabled = mpi_built = mpi_threads_supported


def gloo_built() -> bool:
    """Returns True. Scripts use this function to check for CPU support without MPI."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Returns 0, like a CPU build of Horovod."""
    return 0


ddl_built = ccl_built = nccl_built


def cuda_built() -> bool:
    """Returns False, like a CPU build of Horovod."""
    return False


rocm_built = cuda_built


class ProcessSet:
    """A subset of the ranks. Collectives can use it after it has been passed to `init` or `add_process_set`.

    Args:
        ranks: The ranks in the set. Default: all ranks.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._given = None if ranks is None else sorted(ranks)
        self._queue: CallQueue | None = None
        self._world: ProcessGroup | None = None
        self.process_set_id: int | None = 0 if ranks is None else None

    def __repr__(self) -> str:
        return f"ProcessSet({'all' if self._given is None else self._given}, process_set_id={self.process_set_id})"

    @property
    def ranks(self) -> list[int]:
        """The ranks in the set, in ascending order."""
        return list(range(default_group().size())) if self._given is None else list(self._given)

    def included(self) -> bool:
        """Returns True if this rank is in the set."""
        return default_group().rank() in self.ranks

    def size(self) -> int:
        """Returns the number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns this process's rank within the set.

        Raises:
            ValueError: this rank is not in the set.
        """
        return self.ranks.index(default_group().rank())

    def calls(self) -> CallQueue:
        """Returns the queue that executes calls on this set.

        Raises:
            ValueError: the set has not been added, or this rank is not in it.
        """
        if self._queue is None:
            me = default_group().rank()
            if self._given is None:
                raise ValueError(f"rank {me} made a call before init(); all ranks call paceline.horovod.init() first")
            why = "is not in it" if self.process_set_id is not None else "has not added it; call add_process_set on all"
            raise ValueError(f"rank {me} made a call on {self!r} and {why}")
        return self._queue

    def is_of(self, world: ProcessGroup) -> bool:
        """Returns True if the set is open and belongs to the default group `world`."""
        return self._world is world

    def open(self, number: int) -> None:
        """Creates the set's group. All ranks must open their sets in the same order."""
        self._world = default_group()
        group = new_group(self._given, group_desc=f"paceline.horovod's calls of ranks {self.ranks}")
        self._queue = CallQueue(group) if isinstance(group, ProcessGroup) else None
        self.process_set_id = number
        _opened.append(self)

    def close(self) -> None:
        """Destroys the set's group. Idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue.group.close()
        self._queue = self._world = None
        self.process_set_id = 0 if self._given is None else None
        if self in _opened:
            _opened.remove(self)


global_process_set = ProcessSet()
_opened: list[ProcessSet] = []
_added = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set, or creates one from a list of ranks; returns the set. All ranks must call this."""
    global _added
    _added += 1
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    chosen.open(_added)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; returns False if it had not been added. All ranks must call this."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    process_set.close()
    return True


def open_global_process_set() -> None:
    """Opens the global process set unless it is already open. All ranks must call this."""
    if global_process_set.is_of(default_group()):
        return
    close_process_sets()
    global_process_set.open(0)
    # Asynchronous calls must complete before the groups are destroyed at exit.
    util.Finalize(None, close_process_sets, exitpriority=1)


def close_process_sets() -> None:
    """Closes all process sets, including the global one."""
    for process_set in list(_opened):
        process_set.close()


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **options: object,
) -> list[Any]:
    """Runs `func(*args, **kwargs)` in `np` processes on this machine and returns their results in rank order.

    Args:
        func: A function defined in an importable module. It must call `init`.
        args: The positional arguments.
        kwargs: The keyword arguments.
        np: The number of processes.
        hosts: The name of this machine, such as "localhost:4". Use `paceline run` for jobs on several machines.
        options: Ignored; accepted for compatibility with Horovod (`use_gloo`, `verbose` etc.).

    Raises:
        ValueError: `hosts` contains another machine.
        WorkerError: a process failed. The error message ends with the traceback.
    """
    names = {part.partition(":")[0] for part in (hosts or "localhost").split(",")}
    if names - {"localhost", "127.0.0.1"}:
        raise ValueError(
            f"hosts is {hosts!r}, but run only starts processes on this machine; for several machines use `paceline "
            "run --nnodes N --rdzv-endpoint HOST:PORT` on each"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        spawn(_call, (directory, func, tuple(args), dict(kwargs or {})), nprocs=np)
        # Unpickling is safe, because only the processes started above write to this directory.
        return [pickle.loads(Path(directory, str(rank)).read_bytes()) for rank in range(np)]


def _call(rank: int, directory: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    Path(directory, str(rank)).write_bytes(pickle.dumps(func(*args, **kwargs)))
