"""Checks whether a module and a machine are fit for data parallel training."""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.engine.codes import DTYPE_CODES
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.reductions import reduces
from paceline.parallel.agreement import RankFacts
from paceline.parallel.placement import absent_device_text, wrong_device_text
from paceline.parallel.tracked_tensors import TrackedTensors

_warned = False  # whether this process has warned that there are too many threads


def unsupported_reason(
    tracked: TrackedTensors,
    group: ProcessGroup,
    device_ids: Sequence[torch.device] = (),
    output_device: torch.device | None = None,
    has_delayed: bool = False,
) -> Exception | None:
    """Returns why a module cannot be wrapped, or None if it can.

    Args:
        tracked: the module's tensors.
        group: the ranks.
        device_ids: the module must be on the first of these devices, if there are any.
        output_device: the device of the outputs.
        has_delayed: parameters other than the tracked ones are averaged, so there may be no tracked ones.
    """
    absent = absent_device_text(device_ids, output_device)
    if absent is not None:
        return ValueError(f"rank {group.me.rank}: {absent}")
    device = device_ids[0] if device_ids else None
    with_values = {name: buffer for name, buffer in tracked.buffers.items() if not buffer.is_meta}
    for name, tensor in (tracked.trained | tracked.frozen | with_values).items():
        if torch.nn.parameter.is_lazy(tensor):
            return ValueError(f"{name!r} has no shape yet; call the module once, then wrap it")
        if tensor.device.type not in group.device_types:
            fitting = "init_process_group(backend='cpu:paceline,cuda:nccl')" if tensor.is_cuda else "module.cpu()"
            fitting = "module.to_empty(device='cpu'), then load its state" if tensor.is_meta else fitting
            return ValueError(
                f"{name!r} is on {tensor.device}, and the group's backend {group.backend!r} has no engine for it: "
                f"{fitting}"
            )
        if device is not None and tensor.device != device:
            return ValueError(wrong_device_text(name, tensor, device))
    for name, buffer in tracked.buffers.items():
        if buffer.layout is not torch.strided or buffer.is_nested:
            what = "nested tensor" if buffer.is_nested else f"tensor of layout {buffer.layout}"
            return TypeError(
                f"the buffer {name!r} is a {what}, which cannot be copied to other ranks; give "
                "broadcast_buffers=False, or leave it out with "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
            )
    if not tracked.trained and not has_delayed:
        return RuntimeError(
            "no parameter of the module requires a gradient, so there is nothing to reduce; use it unwrapped"
        )
    for name, param in tracked.trained.items():
        if param.dtype not in DTYPE_CODES or (param.is_cpu and not reduces(DTYPE_CODES[param.dtype], ReduceOp.AVG)):
            return TypeError(f"parameter {name!r} is of {param.dtype}, which cannot be averaged over the ranks")
    return None


def rank_facts(group: ProcessGroup, overlap: bool | None, on_cpu: bool = True) -> RankFacts:
    """Returns what this rank reports about itself; on a GPU, reducing during backward needs no core."""
    named = os.environ.get("LOCAL_WORLD_SIZE", "")
    quota, cgroup = _core.cpu_quota()
    return RankFacts(
        overlaps=True if overlap is None and not on_cpu else overlap,
        host=socket.gethostname(),
        local_ranks=int(named) if named.isdecimal() else 0,
        cores=sorted(os.sched_getaffinity(0)),
        quota=quota,
        cgroup=cgroup,
        threads=torch.get_num_threads(),
    )


def reduces_during_backward(everyones: Sequence[RankFacts]) -> bool:
    """Returns whether every rank was told to, or has a core for its progress thread besides those it computes on."""
    return all(
        _has_core_to_spare(facts, everyones) if facts.overlaps is None else facts.overlaps for facts in everyones
    )


def _has_core_to_spare(mine: RankFacts, everyones: Sequence[RankFacts]) -> bool:
    here = [facts for facts in everyones if facts.host == mine.host]
    beside = [facts for facts in here if not set(facts.cores).isdisjoint(mine.cores)]
    sharing = [facts for facts in here if facts.cgroup == mine.cgroup]
    if mine.quota and sum(facts.threads + 1 for facts in sharing) > mine.quota:
        return False
    # Ranks that are not in this group compete as well, unless the ranks of this host have cores of their own.
    absent = max(0, mine.local_ranks - len(here)) if len(beside) == len(here) else 0
    needed = sum(facts.threads + 1 for facts in beside) + absent * (mine.threads + 1)
    return len({core for facts in beside for core in facts.cores}) >= needed


def warn_of_too_many_threads(everyones: Sequence[RankFacts], group: ProcessGroup) -> None:
    """Warns once, on one rank of each host, if its ranks have more threads than cores."""
    global _warned
    mine = everyones[group.rank()]
    here = [rank for rank, facts in enumerate(everyones) if facts.host == mine.host]
    threads = sum(everyones[rank].threads for rank in here)
    cores = len({core for rank in here for core in everyones[rank].cores})
    if mine.quota and all(everyones[rank].cgroup == mine.cgroup for rank in here):
        cores = min(cores, math.ceil(mine.quota))
    if threads <= cores or len(here) < 2 or here[0] != group.rank() or _warned:
        return
    _warned = True
    fair = max(1, cores // len(here))
    advice = [f"Give each {fair}: set OMP_NUM_THREADS={fair}, or call torch.set_num_threads({fair}) before wrapping"]
    if all(everyones[rank].threads <= fair for rank in here):
        advice = []
    if len(here) > cores:
        advice.append(f"Start no more than {cores} ranks here")
    warnings.warn(
        f"rank {group.me.rank}: the {len(here)} ranks on {mine.host} compute with {threads} threads on "
        f"{cores} cores, so they slow each other down. {'. '.join(advice)}",
        stacklevel=4,
    )
