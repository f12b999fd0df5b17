"""What a program asks about its process groups."""

from __future__ import annotations

import os

from paceline.group.arguments import group_rank_of
from paceline.group.default import Group, find_world, own_world, resolve
from paceline.group.process_group import ProcessGroup


def is_initialized() -> bool:
    """Whether the default process group exists."""
    return find_world() is not None


def is_available() -> bool:
    """Whether Paceline works on this platform: True wherever it could be imported."""
    return True


def get_rank(group: Group = None) -> int:
    """This process's rank in `group`, -1 if it is not in it."""
    resolved = resolve(group)
    return -1 if resolved is None else resolved.rank()


def get_world_size(group: Group = None) -> int:
    """The number of ranks in `group`, -1 if this process is not in it."""
    resolved = resolve(group)
    return -1 if resolved is None else resolved.size()


def get_backend(group: Group = None) -> str:
    """What the group's `backend` was: the name of its engine, or "cpu:paceline,cuda:nccl" where there are several."""
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("get_backend: this rank is not in the group")
    return resolved.backend


def get_pg_count() -> int:
    """The number of process groups that this rank has opened since `init_process_group`, the default group included."""
    world = own_world()
    return 0 if world is None else 1 + len(world.subgroups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank among those of its machine, from LOCAL_RANK.

    Raises:
        ValueError: LOCAL_RANK is not set and there is no `fallback_rank`.
    """
    local_rank = os.environ.get("LOCAL_RANK", fallback_rank)
    if local_rank is None:
        raise ValueError("LOCAL_RANK is not set; start the script with `paceline run`, or pass fallback_rank=")
    return int(local_rank)


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The ranks in the default group of `group`'s members, by group rank."""
    resolved = resolve(group)
    return [] if resolved is None else list(resolved.ranks)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The rank in the default group of a member of `group`.

    Raises:
        ValueError: there is no such member.
    """
    if not 0 <= group_rank < group.size():
        raise ValueError(f"group rank {group_rank} is not in {group}; it has ranks 0 to {group.size() - 1}")
    return group.ranks[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The group rank of a rank of the default group.

    Raises:
        ValueError: it is not a member.
    """
    return group_rank_of(group, global_rank)
