"""Checks that run before a module is wrapped: equal models, supported tensors, existing devices, spare cores."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, ReduceOp
from paceline.comm.group.call_plan import reduces
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import whole_number
from paceline.errors import CollectiveMismatchError, and_more
from paceline.train.module_tensors import TrackedTensors


def require_module(module: object, function: str) -> None:
    """Raises TypeError if the argument of `function` is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: module is a {type(module).__name__}; it must be a torch.nn.Module")


def require_unwrapped(module: nn.Module, function: str) -> None:
    """Raises TypeError if the module, compiled or not, is Paceline's or torch's `DistributedDataParallel`.

    Both classes have an attribute that disables averaging; other modules do not.
    """
    if hasattr(module, "require_backward_grad_sync"):
        raise TypeError(f"{function} got a DistributedDataParallel, which averages over ranks; pass the module inside")


def absent_device_text(device_ids: Sequence[torch.device], output_device: torch.device | None) -> str | None:
    """Returns the error message about a GPU that does not exist on this machine, or None if all GPUs exist."""
    named = {"device_ids": device_ids, "output_device": [] if output_device is None else [output_device]}
    for argument, devices in named.items():
        for device in devices:
            if device.type in ("cpu", "meta"):
                continue
            gpus = torch.cuda.device_count() if device.type == "cuda" else torch.accelerator.device_count()
            if device.index is None or device.index < gpus:
                continue
            if gpus == 0:
                return (
                    f"{argument} contains {device} (a bare number is a GPU's), and this process sees no GPU. To train "
                    "on the CPU leave device_ids and output_device out, or pass None"
                )
            return (
                f"{argument} contains {device}, and this process sees {gpus} GPU{'s' if gpus > 1 else ''}: the numbers "
                f"from 0 to {gpus - 1}, such as LOCAL_RANK with one process for each GPU"
            )
    return None


def wrong_device_text(name: str, tensor: torch.Tensor, device: torch.device) -> str:
    """Returns the error message about a parameter or buffer that is not on the first device in `device_ids`."""
    if tensor.is_meta:
        move = f"module.to_empty(device={str(device)!r}) allocates memory, which must then be initialized"
    elif tensor.is_cpu:
        move = f"module.to({str(device)!r}), or leave device_ids out for a module on the CPU"
    else:
        move = f"module.to({str(device)!r})"
    return f"{name!r} is on {tensor.device}, and device_ids begins with {device}: {move}"


Entry = list[object]

_MOST_NAMED = 8  # the maximum number of ranks that a message lists with each value


@dataclass(frozen=True)
class RankFacts:
    """Information that each rank sends to all ranks before it wraps a module."""

    overlaps: bool | None  # whether reduction should overlap with backward; None if this depends on the number of cores
    host: str
    local_ranks: int  # the number of ranks on the host, including ranks of other groups; 0 if unknown
    cores: list[int]  # the cores on which the rank can run
    quota: float  # the CPU limit of the cgroup, in cores; 0 for no limit
    cgroup: int  # a number that identifies the cgroup
    threads: int  # the number of threads that torch uses


def describe_tensors(tracked: TrackedTensors) -> list[Entry]:
    """Returns the name, shape, strides, dtype, device type and requires_grad of each parameter and buffer."""
    described: list[Entry] = []
    for kind, named in (("parameter", tracked.trained | tracked.frozen), ("buffer", tracked.buffers)):
        for name, tensor in named.items():
            shape = list(tensor.shape)
            where = "" if tensor.is_cpu else f" on {tensor.device.type}"
            described.append([kind, name, shape, list(tensor.stride()), f"{tensor.dtype}{where}", tensor.requires_grad])
    return described


def require_same_module(
    tracked: TrackedTensors,
    options: dict[str, object],
    facts: RankFacts,
    problem: Exception | None,
    group: ProcessGroup,
) -> list[RankFacts]:
    """Compares the model and its wrapper's options across ranks; returns the information about every rank.

    If an error in `problem` keeps this rank from wrapping its module, it is raised after all ranks have received it.

    Raises:
        CollectiveMismatchError: models or options differ, or another rank has a problem; raised on every rank. If
            models or options differ, the message lists the differing values and the ranks that have each value.
    """
    description = [] if problem is not None else describe_tensors(tracked)
    digest = hashlib.blake2b(json.dumps(description).encode(), digest_size=16).hexdigest()
    mine: dict[str, object] = {"digest": digest, "options": options, "facts": asdict(facts)}
    mine["problem"] = str(problem) if problem else None
    from_all = [json.loads(data) for data in group.all_gather_bytes(json.dumps(mine).encode())]
    if problem is not None:
        raise problem
    for rank, other in zip(group.ranks, from_all, strict=True):
        if other["problem"] is not None:
            raise CollectiveMismatchError(
                f"rank {group.me.rank}: rank {rank} could not wrap its module, so no rank can: "
                f"{other['problem']}. Build the same model on every rank and wrap it the same way"
            )
    for option, value in options.items():
        values = [other["options"].get(option) for other in from_all]
        if any(theirs != value for theirs in values):
            sides = _sides([f"{option}={theirs!r}" for theirs in values], group.ranks)
            raise CollectiveMismatchError(
                f"rank {group.me.rank}: the module is not wrapped in the same way on all ranks: {sides}. Pass the same "
                "arguments on every rank"
            )
    if any(other["digest"] != digest for other in from_all):
        descriptions = [json.loads(data) for data in group.all_gather_bytes(json.dumps(description).encode())]
        raise CollectiveMismatchError(
            f"rank {group.me.rank}: the models differ: {_first_difference(descriptions, group.ranks)}. "
            "Build the same model on every rank (same arguments, same order of layers) before wrapping it"
        )
    return [RankFacts(**other["facts"]) for other in from_all]


def _first_difference(descriptions: Sequence[list[Entry]], ranks: Sequence[int]) -> str:
    for index in range(max(map(len, descriptions))):
        texts = [_entry_text(entries[index] if index < len(entries) else None) for entries in descriptions]
        if any(text != texts[0] for text in texts):
            return _sides(texts, ranks)
    raise AssertionError("descriptions whose digests differ are equal")


def _sides(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Formats each value with the ranks that have it, beginning with rank 0's value."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(held_by) > 1 else ''} {and_more(held_by, _MOST_NAMED)}: {value}"
        for value, held_by in holders.items()
    )


def _entry_text(entry: Entry | None) -> str:
    if entry is None:
        return "nothing in its place"
    kind, name, shape, stride, dtype, requires_grad = entry
    return f"{kind} {name!r} of shape {shape}, strides {stride}, {dtype}, requires_grad={requires_grad}"


_warned = False  # whether this process has already warned about too many threads


def unsupported_reason(
    tracked: TrackedTensors,
    group: ProcessGroup,
    device_ids: Sequence[torch.device],
    output_device: torch.device,
    has_delayed: bool,
) -> Exception | None:
    """Returns the error that prevents the module from being wrapped, or None.

    If `has_delayed` is True, untracked parameters are averaged too, and tracked parameters are not required.
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
                f"the buffer {name!r} is a {what}, which cannot be copied to other ranks; pass "
                "broadcast_buffers=False, or leave it out with "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
            )
    for name, tensor in (tracked.trained | tracked.frozen | with_values).items():
        # 1 is at::MemOverlap::Yes: a dimension of several elements has stride 0.
        if tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1:
            return RuntimeError(
                f"several elements of {name!r} share a memory location (shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())}), so values from other ranks cannot be written to it; register a clone() of "
                "the expanded tensor instead"
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
    """Collects the information about this rank. By default, overlap is requested if all parameters are on GPUs."""
    quota, cgroup = _core.cpu_quota()
    return RankFacts(
        overlaps=True if overlap is None and not on_cpu else overlap,
        host=socket.gethostname(),
        local_ranks=whole_number(os.environ.get("LOCAL_WORLD_SIZE", "")) or 0,
        cores=sorted(os.sched_getaffinity(0)),
        quota=quota,
        cgroup=cgroup,
        threads=torch.get_num_threads(),
    )


def reduces_during_backward(everyones: Sequence[RankFacts]) -> bool:
    """Returns True if every rank requests overlap or, by default, has a spare core for reducing during backward."""
    return all(
        _has_core_to_spare(facts, everyones) if facts.overlaps is None else facts.overlaps for facts in everyones
    )


def _has_core_to_spare(mine: RankFacts, everyones: Sequence[RankFacts]) -> bool:
    on_host = [facts for facts in everyones if facts.host == mine.host]
    beside = [facts for facts in on_host if not set(facts.cores).isdisjoint(mine.cores)]
    sharing = [facts for facts in on_host if facts.cgroup == mine.cgroup]
    if mine.quota and sum(facts.threads + 1 for facts in sharing) > mine.quota:
        return False
    # Ranks in other groups also use these cores, unless each rank on this host is pinned to different cores.
    absent = max(0, mine.local_ranks - len(on_host)) if len(beside) == len(on_host) else 0
    needed = sum(facts.threads + 1 for facts in beside) + absent * (mine.threads + 1)
    return len({core for facts in beside for core in facts.cores}) >= needed


def warn_of_torchs_sync_batch_norm(module: nn.Module, group: ProcessGroup) -> None:
    """Warns on one rank if the module contains PyTorch's SyncBatchNorm, which requires torch.distributed."""
    named = [name for name, layer in module.named_modules() if type(layer) is nn.SyncBatchNorm]
    if not named or group.size() == 1 or group.rank() != 0:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    warnings.warn(
        f"{named[0]!r}{f' and {len(named) - 1} other layers' if len(named) > 1 else ''} of {type(module).__name__} are "
        "torch.nn.SyncBatchNorm, which normalizes each rank's batch alone because torch.distributed is not "
        "initialized. Replace the layers before wrapping: model = paceline.SyncBatchNorm.convert_sync_batchnorm(model)",
        stacklevel=4,
    )


def warn_of_too_many_threads(everyones: Sequence[RankFacts], group: ProcessGroup) -> None:
    """Warns once, on one rank per host, if the host's ranks use more threads than there are cores."""
    global _warned
    mine = everyones[group.rank()]
    on_host = [rank for rank, facts in enumerate(everyones) if facts.host == mine.host]
    threads = sum(everyones[rank].threads for rank in on_host)
    cores = len({core for rank in on_host for core in everyones[rank].cores})
    if mine.quota and all(everyones[rank].cgroup == mine.cgroup for rank in on_host):
        cores = min(cores, math.ceil(mine.quota))
    if threads <= cores or len(on_host) < 2 or on_host[0] != group.rank() or _warned:
        return
    _warned = True
    fair = max(1, cores // len(on_host))
    advice = [f"Give each {fair}: set OMP_NUM_THREADS={fair}, or call torch.set_num_threads({fair}) before wrapping"]
    if all(everyones[rank].threads <= fair for rank in on_host):
        advice = []
    if len(on_host) > cores:
        advice.append(f"Start no more than {cores} ranks here")
    warnings.warn(
        f"rank {group.me.rank}: the {len(on_host)} ranks on {mine.host} compute with {threads} threads on "
        f"{cores} cores, so they slow each other down. {'. '.join(advice)}",
        stacklevel=4,
    )
