"""Barriers, groups, calls made by ranks outside a group, and queries about groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torch_calls.case import case, tensor


@case
def barriers(d: Any, r: int, n: int) -> object:
    d.monitored_barrier(timeout=5.5)
    d.monitored_barrier(None, timedelta(seconds=5), True)
    d.monitored_barrier(d.group.WORLD, wait_all_ranks=True)
    return [d.barrier(), d.barrier(d.group.WORLD, False, None), d.barrier(async_op=True).wait()]


@case
def groups_of_one(d: Any, r: int, n: int) -> object:
    groups = [d.new_group([rank]) for rank in range(n)]
    alone = groups[r]
    t = tensor(r, 4)
    d.all_reduce(t, group=alone)
    d.broadcast(t, r, group=alone)
    d.reduce(t, r, group=alone)
    d.all_gather(gathered := [torch.empty(4)], t, group=alone)
    d.gather(t, gathered, r, group=alone)
    d.scatter(t, gathered, r, group=alone)
    d.reduce_scatter(t, [tensor(r, 4)], group=alone)
    d.all_gather_into_tensor(t, tensor(r, 4), group=alone)
    d.all_to_all_single(t, tensor(r, 4), group=alone)
    d.all_gather_object(objects := [None], {"a": r}, group=alone)
    d.barrier(alone)
    d.barrier()
    return [t, gathered, objects, d.get_rank(alone), d.get_world_size(alone), d.get_process_group_ranks(alone)]


@case
def calls_of_a_rank_that_is_not_in_the_group(d: Any, r: int, n: int) -> object:
    groups = [d.new_group([rank]) for rank in range(n)]
    other, t = groups[1 - r], tensor(r, 4)
    results = [
        d.all_reduce(t, group=other),
        d.broadcast(t, 1 - r, group=other),
        d.all_gather([t], t, group=other),
        d.reduce(t, 1 - r, group=other),
        d.all_reduce(t, group=d.GroupMember.NON_GROUP_MEMBER, async_op=True),
        d.gather(t, None, 1 - r, group=other),
        d.scatter(t, None, 1 - r, group=other),
        d.barrier(other),
        d.get_rank(other),
        d.get_world_size(other),
        d.all_gather_object([None], r, group=other),
    ]
    return [*results, t]


@case
def new_groups(d: Any, r: int, n: int) -> object:
    results = []
    for arguments in (
        {},
        {"ranks": None},
        {"ranks": (0, 1)},
        {"ranks": range(2)},
        {"ranks": [0, 1], "timeout": timedelta(seconds=20), "backend": None, "pg_options": None},
        {"ranks": [0, 1], "use_local_synchronization": True, "group_desc": "both"},
        {"ranks": [0, 1], "timeout": timedelta(seconds=20), "device_id": None},
    ):
        group = d.new_group(**arguments)
        d.all_reduce(t := tensor(r, 2), group=group)
        results += [t, d.get_rank(group), d.get_process_group_ranks(group)]
        d.destroy_process_group(group)
    return results


@case
def subgroups(d: Any, r: int, n: int) -> object:
    mine, everyone = d.new_subgroups(1)
    also, _ = d.new_subgroups_by_enumeration([[0], [1]])
    whole, _ = d.new_subgroups(group_size=2, timeout=timedelta(seconds=20))
    return [d.get_world_size(mine), len(everyone), d.get_rank(also), d.get_rank(whole)]


@case
def questions(d: Any, r: int, n: int) -> object:
    world = d.group.WORLD
    return [
        d.get_rank(),
        d.get_rank(None),
        d.get_rank(group=world),
        d.get_world_size(),
        d.get_global_rank(world, r),
        d.get_group_rank(world, r),
        d.get_process_group_ranks(None),
        d.get_process_group_ranks(world),
        d.is_initialized(),
        d.is_available(),
        d.is_backend_available("gloo"),
        d.is_backend_available("GLOO"),
        d.is_backend_available("cpu:gloo"),
        d.is_backend_available("nothing"),
        d.is_torchelastic_launched(),
        d.is_ucc_available(),
        d.is_xccl_available(),
        d.get_debug_level() == torch.distributed.DebugLevel.OFF,
        d.get_node_local_rank(3) >= 0,
        str(d.Backend("GLOO")),
        d.Backend.GLOO,
        isinstance(d.get_backend(), str),
        isinstance(d.get_backend_config(), str),
        isinstance(d.get_default_backend_for_device("cpu"), str),
        d.get_pg_count() > 0,
        d.supports_complex(d.ReduceOp.SUM),
        d.supports_complex(d.ReduceOp.MAX),
        d.default_pg_timeout,
    ]
