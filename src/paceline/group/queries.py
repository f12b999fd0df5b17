"""Functions that return facts about process groups."""

from __future__ import annotations

import os

from paceline.group.arguments import group_rank_of
from paceline.group.default import Group, beside, find_world, own_world, resolve
from paceline.group.process_group import ProcessGroup


def is_initialized() -> bool:
    """Returns whether the default process group exists."""
    return find_world() is not None


def is_available() -> bool:
    """Returns whether Paceline works on this platform, which is True wherever it can be imported."""
    return True


def get_rank(group: Group = None) -> int:
    """Returns this process's rank in `group`, -1 if it is not a member."""
    if group is None and (last := beside()) is not None:
        return last
    resolved = resolve(group)
    return -1 if resolved is None else resolved.rank()


def get_world_size(group: Group = None) -> int:
    """Returns the number of ranks in `group`, -1 if this process is not a member."""
    if group is None and (last := beside()) is not None:
        return last + 1
    resolved = resolve(group)
    return -1 if resolved is None else resolved.size()


def get_backend(group: Group = None) -> str:
    """Returns the group's backend: the name of its engine, or such as "cpu:paceline,cuda:nccl" if it has several.

    Raises:
        ValueError: this rank is not in the group.
    """
    resolved = resolve(group)
    if resolved is None:
        raise ValueError("get_backend: this rank is not in the group")
    return resolved.backend


def get_pg_count() -> int:
    """Returns how many process groups this rank has made since `init_process_group`, including the default group."""
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
    """Returns the rank in the default group of a member of `group`.

    Raises:
        ValueError: the group has no such rank.
    """
    if not 0 <= group_rank < group.size():
        raise ValueError(f"group rank {group_rank} is not in {group}; it has ranks 0 to {group.size() - 1}")
    return group.ranks[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Returns the group rank of a rank of the default group.

    Raises:
        ValueError: it is not a member of the group.
    """
    return group_rank_of(group, global_rank)
