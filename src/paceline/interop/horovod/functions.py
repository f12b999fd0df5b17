"""Functions that broadcast parameters, optimizer states and objects, or gather objects from all ranks."""

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
    """Overwrites the parameters on every rank with those of the root.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: The source rank.

    Raises:
        ValueError: an entry is not a tensor.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors: list[Any] = [entry[1] if isinstance(entry, tuple) else entry for entry in named]
    if (other := next((entry for entry in tensors if not isinstance(entry, torch.Tensor)), None)) is not None:
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
    """Overwrites the optimizer's state and options on every rank with those of the root.

    Args:
        optimizer: The optimizer, which may be a `DistributedOptimizer`.
        root_rank: The source rank.
        model: Ignored.
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
        obj: The object to send; ignored on ranks other than the root.
        root_rank: The source rank.
        name: The name of the call, which must be the same on all ranks.
        process_set: The participating ranks.
        allow_pickle: Whether to permit objects of any type, which are pickled. Unpickling allows the sender to run code
            on the other ranks. Numbers, strings, containers, tensors and arrays do not need pickling.
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
    """Returns the objects from all ranks in rank order. See `broadcast_object` for `allow_pickle`."""
    objects: list[Any] = [None] * process_set.size()

    def run(group: ProcessGroup) -> list[Any]:
        all_gather_object(objects, obj, group, allow_pickle=allow_pickle)
        return objects

    return process_set.calls().perform(CallRequest(CallKind.OBJECTS, [], run, "allgather_object", name))
