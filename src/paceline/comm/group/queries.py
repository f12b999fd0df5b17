"""Queries about process groups and backends."""

from __future__ import annotations

import os

import torch

from paceline.comm.engine.codes import ReduceOp, Reduction
from paceline.comm.engine.registry import choose, engines_for, missing_piece
from paceline.comm.group.call_plan import group_rank_of
from paceline.comm.group.default import Group, find_world, observed_world_size, own_world, resolve
from paceline.comm.group.process_group import ProcessGroup


def is_initialized() -> bool:
    """Returns whether the default process group exists."""
    return find_world() is not None


def is_available() -> bool:
    """Returns whether Paceline is available: always True, since it cannot be imported on unsupported platforms."""
    return True


def get_rank(group: Group = None) -> int:
    """Returns this process's rank in `group`, or -1 if it is not a member."""
    if group is None and (last := observed_world_size()) is not None:
        return last
    resolved = resolve(group)
    return -1 if resolved is None else resolved.rank()


def get_world_size(group: Group = None) -> int:
    """Returns the number of ranks in `group`, or -1 if this process is not a member."""
    if group is None and (last := observed_world_size()) is not None:
        return last + 1
    resolved = resolve(group)
    return -1 if resolved is None else resolved.size()


def get_backend(group: Group = None) -> str:
    """Returns the group's backend: the engine's name or, for several engines, a list like "cpu:paceline,cuda:nccl".

    Raises:
        ValueError: this rank is not in the group.
    """
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("get_backend: this rank is not in the group")
    return resolved.backend


def get_pg_count() -> int:
    """Returns the number of process groups created since `init_process_group`, including the default group."""
    world = own_world()
    return 0 if world is None else 1 + len(world.subgroups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Returns this process's rank among the ranks of its machine, from the environment variable LOCAL_RANK.

    Raises:
        ValueError: LOCAL_RANK is not set and there is no `fallback_rank`.
    """
    local_rank = os.environ.get("LOCAL_RANK", fallback_rank)
    if local_rank is None:
        raise ValueError("LOCAL_RANK is not set; start the script with `paceline run`, or pass fallback_rank=")
    return int(local_rank)


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Returns the ranks of the group's members in the default group, in the order of their group ranks."""
    resolved = resolve(group)
    return [] if resolved is None else list(resolved.ranks)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Converts a group rank in `group` to a rank in the default group.

    Raises:
        ValueError: the group has no such rank.
    """
    if not 0 <= group_rank < group.size():
        raise ValueError(f"group rank {group_rank} is not in {group}; it has ranks 0 to {group.size() - 1}")
    return group.ranks[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Converts a rank in the default group to a group rank in `group`.

    Raises:
        ValueError: the rank is not a member of the group.
    """
    return group_rank_of(group, global_rank, "get_group_rank", "global_rank")


_BEST = {"cpu": "paceline", "cuda": "nccl"}


class Backend(str):
    """The name of a backend in lower case: `Backend("GLOO")` is "gloo".

    >>> Backend.PACELINE, Backend("GLOO")
    ('paceline', 'gloo')
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    PACELINE = "paceline"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"

    backend_list = (UNDEFINED, PACELINE, GLOO, MPI, NCCL)
    default_device_backend_map = _BEST

    def __new__(cls, name: str) -> Backend:
        """Returns the name in lower case.

        Raises:
            ValueError: `name` is not a string.
        """
        if not isinstance(name, str):
            raise ValueError(f"Backend takes the name of a backend, not {name!r}")
        return super().__new__(cls, name.lower())


def is_backend_available(backend: str) -> bool:
    """Returns whether `backend`, such as "gloo" or "cpu:gloo,cuda:nccl", can be used on this machine."""
    try:
        chosen = choose(backend)
    except ValueError:
        return False
    return all(missing_piece(name) is None for name in chosen.engines.values())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Returns the backend for tensors on `device` in a program that does not name a backend.

    Raises:
        ValueError: there is no backend for that device.
    """
    device_type = torch.device(device).type
    best = _BEST.get(device_type)
    if best is None or best not in engines_for(device_type):
        raise ValueError(f"there is no backend for tensors on {device_type}; there are backends for {', '.join(_BEST)}")
    return best


def get_backend_config(group: Group = None) -> str:
    """Returns the group's backend for each type of device, such as "cpu:paceline,cuda:nccl".

    Raises:
        ValueError: this rank is not in the group.
    """
    chosen = choose(get_backend(group))
    return ",".join(f"{device_type}:{name}" for device_type, name in chosen.engines.items())


def is_nccl_available() -> bool:
    """Returns whether backend="nccl" can be used on this machine."""
    return missing_piece("nccl") is None


def is_mpi_available() -> bool:
    """Returns whether backend="mpi" can be used on this machine."""
    return missing_piece("mpi") is None


def is_gloo_available() -> bool:
    """Returns whether backend="gloo" can be used on this machine."""
    return missing_piece("gloo") is None


def is_ucc_available() -> bool:
    """Returns False, since Paceline has no engine for backend="ucc"."""
    return False


def is_xccl_available() -> bool:
    """Returns False, since Paceline has no engine for backend="xccl"."""
    return False


def is_torchelastic_launched() -> bool:
    """Returns whether `paceline run` or torchrun, which both set TORCHELASTIC_RUN_ID, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def supports_complex(op: Reduction) -> bool:
    """Returns whether complex tensors can be reduced by `op`."""
    return op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
