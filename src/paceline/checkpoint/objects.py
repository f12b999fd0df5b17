"""What a training loop's objects have in a checkpoint: modules, optimizers, loaders and everything with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.captured import Captured, Held, whole_of
from paceline.checkpoint.element_types import name_of
from paceline.checkpoint.layout import RunPart, parts_of_run
from paceline.checkpoint.names import join
from paceline.checkpoint.trees import take_apart
from paceline.data.loader import StatefulLoader
from paceline.elastic.registry import Stateful
from paceline.elastic.state import ElasticState
from paceline.parallel.ddp.module import DistributedDataParallel
from paceline.parallel.sharded.loader import ShardLoader
from paceline.parallel.sharded.logical import LogicalShards
from paceline.parallel.zero.groups import to_state_dict
from paceline.parallel.zero.parameters import ShardedParameters, sharded_parameters_of
from paceline.parallel.zero.partitioned import PartitionedOptimizer
from paceline.parallel.zero.shards import Shard

State = Mapping[str, Any]
_WRAPPERS = (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)


def capture(state: State, is_first: bool) -> Captured:
    """Returns what this rank contributes to a checkpoint of `state`; nothing is copied.

    Args:
        state: objects and plain values by name.
        is_first: whether this is the first rank, whose buffers and positions count.

    Raises:
        TypeError: something in the state cannot be held by a checkpoint; the message names it.
    """
    into = Captured(is_first)
    for name, value in entries(state):
        _capture(name, value, into)
    return into


def entries(state: State, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the objects and values of a state with their names, those of nested dicts and of an ElasticState too.

    Raises:
        TypeError: a name is not a text.
    """
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"the state has the key {key!r} of type {type(key).__name__}; names are texts")
        inner = join(name, key)
        if isinstance(value, ElasticState):
            yield from entries(value.parts(), inner)
            yield join(inner, "epoch"), value
        elif isinstance(value, dict) and holds_objects(value):
            yield from entries(value, inner)
        else:
            yield inner, value


def holds_objects(value: dict[Any, Any]) -> bool:
    """Whether a dict holds anything that is loaded in place, rather than only plain values."""
    return any(
        holds_objects(each) if isinstance(each, dict) else isinstance(each, (torch.Tensor, Stateful, LogicalShards))
        for each in value.values()
    )


def module_of(value: object) -> nn.Module | None:
    """Returns the model itself, whatever it is wrapped in; None for something else."""
    if isinstance(value, LogicalShards):
        return value.module
    while isinstance(value, _WRAPPERS):
        value = value.module
    return value if isinstance(value, nn.Module) else None


def _capture(name: str, value: object, into: Captured) -> None:
    module = module_of(value)
    if module is not None:
        _capture_module(name, module, into)
    elif isinstance(value, PartitionedOptimizer):
        _capture_partitioned(name, value, into)
    elif isinstance(value, torch.optim.Optimizer):
        _capture_optimizer(name, value.state_dict(), into)
    elif isinstance(value, (StatefulLoader, ShardLoader)):
        if into.is_first:  # in the last step of an epoch, the first rank's position is that of all
            into.values[name] = _only_plain(name, value.state_dict())
    elif isinstance(value, torch.Tensor):
        into.add_tensor(name, value)
    else:
        into.add_object(name, value.state_dict() if isinstance(value, Stateful) else value)


def _only_plain(name: str, state: object) -> object:
    taken = Captured()
    taken.add_object(name, state)
    if taken.objects[name].tensors:
        raise TypeError(f"the state of {name!r} has tensors; the position of a loader must consist of plain values")
    return taken.objects[name].value


def _capture_module(name: str, module: nn.Module, into: Captured) -> None:
    sharded = sharded_parameters_of(module)
    for key, value in module.state_dict(keep_vars=True).items():
        full = join(name, key)
        shards = None if sharded is None else sharded.shards_of(value)
        if shards is not None:
            for shard in shards:
                if (run := ShardedParameters.own_run(shard)) is not None:
                    into.held += held_of(full, shard, run)
        elif isinstance(value, nn.Parameter):
            into.add_tensor(full, value)
        elif isinstance(value, torch.Tensor):
            into.add_of_first(full, value)
        else:
            into.add_object(full, value)


def _capture_optimizer(name: str, state: Mapping[str, Any], into: Captured) -> None:
    for key, value in state.items():
        if key != "state":
            into.add_tree(join(name, key), value)
            continue
        for index, values in value.items():
            for what, each in values.items():
                into.add_tree(join(name, "state", index, what), each)


def _capture_partitioned(name: str, optimizer: PartitionedOptimizer, into: Captured) -> None:
    into.add_tree(join(name, "param_groups"), to_state_dict(optimizer.param_groups, {})["param_groups"])
    for place, shard, values in optimizer.own_parts():
        for key, value in values.items():
            full = join(name, "state", place, key)
            if isinstance(value, torch.Tensor) and value.shape == shard.run_shape and not shard.is_whole:
                into.held += held_of(full, shard, value)
            elif shard.is_first_part:
                _hold_alone(full, value, into)


def _hold_alone(name: str, value: object, into: Captured) -> None:
    """Adds what this rank alone contributes."""
    tensors: dict[str, torch.Tensor] = {}
    taken = take_apart(name, value, tensors)
    if not isinstance(value, torch.Tensor):
        into.values[name] = taken
    into.held += [whole_of(each, tensor) for each, tensor in tensors.items()]


def held_of(name: str, shard: Shard, run: torch.Tensor) -> list[Held]:
    """Returns the elements of a shard as what this rank holds of the parameter, or of a tensor of its shape."""
    shape, dtype = tuple(shard.shape), name_of(run.dtype)
    if shard.is_whole:
        return [whole_of(name, run.detach())]

    def part_of(part: RunPart) -> Held:
        nbytes = (part.stop - part.start) * run.element_size()
        return Held(name, dtype, shape, part.region, nbytes, lambda: part.row_major(run.detach()))

    return [part_of(part) for part in parts_of_run(shape, shard.strides, *shard.elements)]
