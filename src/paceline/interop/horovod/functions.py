"""Brings all ranks to the root's state: parameters, optimizers and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.comm.group.collectives.coalesced import broadcast_coalesced
from paceline.comm.group.collectives.object_collectives import all_gather_object, broadcast_object_list
from paceline.comm.group.process_group import ProcessGroup
from paceline.interop.horovod.basics import ProcessSet, global_process_set
from paceline.interop.horovod.call_queue import CallKind, CallRequest

Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Copies the root's parameters into those of every rank.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: the rank that has them.

    Raises:
        ValueError: an entry is no tensor.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors: list[Any] = [each[1] if isinstance(each, tuple) else each for each in named]
    if (other := next((each for each in tensors if not isinstance(each, torch.Tensor)), None)) is not None:
        raise ValueError(f"broadcast_parameters got a {type(other).__name__}; it takes tensors")
    if tensors:
        detached = [tensor.detach() for tensor in tensors]
        global_process_set.calls().perform(
            CallRequest(
                CallKind.BROADCAST,
                detached,
                lambda group: broadcast_coalesced(detached, root_rank, group),
                f"broadcast_parameters, root_rank={root_rank}",
            )
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Gives every rank's optimizer the state and the options of the root's.

    Args:
        optimizer: an optimizer, which may come from `DistributedOptimizer`.
        root_rank: the rank that has the state.
        model: is not used.
    """
    mine = optimizer.state_dict()
    received = broadcast_object(mine, root_rank)
    if global_process_set.rank() != root_rank:
        optimizer.load_state_dict(received)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> Any:
    """Returns the root's object on every rank.

    Args:
        obj: the object; that of the root counts.
        root_rank: the rank that has it.
        name: the call's name, the same on all ranks.
        process_set: the ranks that take part.
        allow_pickle: whether objects of any type are sent. Horovod always pickles, which lets each rank run code on the
            others; here numbers, strings, containers, tensors and arrays need no pickling.
    """
    objects = [obj]

    def run(group: ProcessGroup) -> Any:
        broadcast_object_list(objects, root_rank, group, allow_pickle=allow_pickle)
        return objects[0]

    details = f"broadcast_object, root_rank={root_rank}"
    return process_set.calls().perform(CallRequest(CallKind.OBJECTS, [], run, details, name))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, allow_pickle: bool = False
) -> list[Any]:
    """Returns all ranks' objects by rank; `allow_pickle` is that of `broadcast_object`."""
    objects: list[Any] = [None] * process_set.size()

    def run(group: ProcessGroup) -> list[Any]:
        all_gather_object(objects, obj, group, allow_pickle=allow_pickle)
        return objects

    return process_set.calls().perform(CallRequest(CallKind.OBJECTS, [], run, "allgather_object", name))
