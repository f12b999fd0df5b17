"""Functions that divide the ranks of a group into several new groups.

A rank outside all new groups receives `GroupMember.NON_GROUP_MEMBER`, on which calls do nothing. torch.distributed
returns None in this case, which later calls would interpret as the default group.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Sequence

import torch

from paceline.comm.engine.registry import choose
from paceline.comm.group.default import Group, GroupMember, NonMember, default_group, resolve
from paceline.comm.group.engines import agreed_identity
from paceline.comm.group.init import open_group, require_no_options
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import Timeout
from paceline.errors import CollectiveMismatchError

Subgroups = tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Divides the ranks of `group` (default: all) into groups of `group_size`, in order; all its ranks must call this.

    Args:
        group_size: the number of ranks in each group. The default is LOCAL_WORLD_SIZE or, if it is not set, the number
            of ranks per machine.
        timeout: the timeout of calls on the new groups; the default group's timeout if None.
        backend: the backend as for `new_group`.
        pg_options: must be None; no engine has options.
        group_desc: the name of the new groups in error messages.

    Returns:
        The new group that contains this rank, and a list of all new groups, in which `GroupMember.NON_GROUP_MEMBER`
        replaces the groups without this rank.

    Raises:
        ValueError: `group_size` does not divide the number of ranks.
        CollectiveMismatchError: the ranks passed different arguments.
        RendezvousTimeoutError: a rank did not call this.
    """
    parent = resolve(group)
    if parent is None:
        return GroupMember.NON_GROUP_MEMBER, []
    size = _ranks_of_a_machine(parent) if group_size is None else group_size
    if size < 1 or parent.size() % size:
        raise ValueError(
            f"new_subgroups: {parent} has {parent.size()} ranks, which cannot be divided into groups of "
            f"group_size={size}; give a group_size that divides them, or use new_subgroups_by_enumeration"
        )
    lists = [list(range(first, first + size)) for first in range(0, parent.size(), size)]
    return _split(parent, lists, "new_subgroups", timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Creates a group from each list of ranks in the default group; all ranks must call this with the same lists.

    A rank may be in at most one list. See `new_subgroups` for the other arguments and the result.

    Raises:
        ValueError: there are no lists, a list is empty, or a rank does not exist or is in two lists.
        CollectiveMismatchError: the ranks passed different lists.
        RendezvousTimeoutError: a rank did not call this.
    """
    return _split(
        default_group(),
        ranks_per_subgroup_list,
        "new_subgroups_by_enumeration",
        timeout,
        backend,
        pg_options,
        group_desc,
    )


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | NonMember:
    """Creates a group from each list of ranks in `parent_pg`; all ranks of `parent_pg` must call this.

    The default parent is the default group. The lists contain group ranks in the parent. A rank may be in at most one
    list. See `new_subgroups` for the other arguments.

    Returns:
        The new group that contains this rank, or `GroupMember.NON_GROUP_MEMBER`.

    Raises:
        ValueError: there are no lists, a list is empty, or a rank does not exist or is in two lists.
        CollectiveMismatchError: the ranks passed different lists.
        RendezvousTimeoutError: a rank did not call this.
    """
    parent = resolve(parent_pg)
    if parent is None:
        return GroupMember.NON_GROUP_MEMBER
    return _split(parent, split_ranks or [], "split_group", timeout, backend, pg_options, group_desc)[0]


def _split(
    parent: ProcessGroup,
    lists: Sequence[Sequence[int]],
    call: str,
    timeout: Timeout | None,
    backend: str | None,
    pg_options: None,
    group_desc: str | None,
) -> Subgroups:
    if backend is not None:
        choose(backend)
    require_no_options(pg_options, call)
    divided = [list(ranks) for ranks in lists]
    _require_division(divided, parent.size(), call)
    identity = _agree(parent, divided, call)
    groups: list[ProcessGroup | NonMember] = []
    mine: ProcessGroup | NonMember = GroupMember.NON_GROUP_MEMBER
    for index, ranks in enumerate(divided):
        groups.append(GroupMember.NON_GROUP_MEMBER)
        if parent.rank() in ranks:
            world_ranks = [parent.ranks[rank] for rank in ranks]
            name = f"group of ranks {world_ranks}" if group_desc is None else group_desc
            mine = groups[-1] = open_group(world_ranks, timeout, name, agreed_identity(identity ^ index), backend)
    return mine, groups


def _agree(parent: ProcessGroup, lists: list[list[int]], call: str) -> int:
    """Returns a number, chosen by the parent's first rank, that identifies these new groups among all others."""
    mine = torch.tensor([secrets.randbits(61), zlib.crc32(repr(lists).encode())], device="cpu")
    everyone = [torch.empty_like(mine) for _ in parent.ranks]
    parent.all_gather(everyone, mine)
    identity, wanted = everyone[0].tolist()
    others = [parent.ranks[rank] for rank, other in enumerate(everyone) if int(other[1]) != wanted]
    if others:
        raise CollectiveMismatchError(
            f"{parent.me}: {call}: ranks {others} want other groups than rank {parent.ranks[0]}; "
            f"this rank wants {lists} (ranks of {parent}). Pass the same lists on all ranks. The group remains usable"
        )
    return int(identity)


def _require_division(lists: list[list[int]], size: int, call: str) -> None:
    if not lists:
        raise ValueError(f"{call}: there are no lists of ranks; give at least one")
    seen: dict[int, list[int]] = {}
    for ranks in lists:
        if not ranks:
            raise ValueError(f"{call}: a list of ranks is empty; leave it out")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"{call}: rank {rank} of {ranks} does not exist; the group has ranks 0 to {size - 1}")
            if rank in seen:
                raise ValueError(f"{call}: rank {rank} is in {seen[rank]} and in {ranks}; it can be in one, and once")
            seen[rank] = ranks


def _ranks_of_a_machine(group: ProcessGroup) -> int:
    set_by_launcher = os.environ.get("LOCAL_WORLD_SIZE")
    if set_by_launcher is not None and group is default_group():
        return int(set_by_launcher)
    hosts = [member.host for member in group.members]
    size = hosts.count(hosts[0])
    if any(len(set(hosts[first : first + size])) != 1 for first in range(0, len(hosts), size)):
        raise ValueError(
            f"new_subgroups: the hosts of {group} are {hosts}, which are not {size} ranks a host in a row; "
            "give group_size or use new_subgroups_by_enumeration"
        )
    return size
