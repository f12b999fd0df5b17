"""What optimizers have in a checkpoint: their state as the optimizer of the whole model would have it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.checkpoint.captured import Captured, require_dense, whole_of
from paceline.checkpoint.divided import (
    held_of_shard,
    is_first_of,
    is_part,
    parameters_of,
    part_of,
    part_of_saved,
    region_of,
    shape_of,
)
from paceline.checkpoint.names import join
from paceline.checkpoint.numbering import Numbering
from paceline.checkpoint.trees import take_apart
from paceline.parallel.tensor.slices import slice_of
from paceline.parallel.zero.groups import to_state_dict
from paceline.parallel.zero.partitioned import PartitionedOptimizer


def capture_optimizer(name: str, optimizer: Optimizer, into: Captured, numbering: Numbering | None) -> None:
    """Adds an optimizer.

    Args:
        numbering: of a pipeline's; None for one that has all of the model's parameters.

    Raises:
        TypeError: it keeps something that a checkpoint cannot put together.
    """
    parameters = parameters_of(optimizer)
    numbers = list(range(len(parameters))) if numbering is None else list(chain(*numbering.of_own(optimizer)))
    if isinstance(optimizer, PartitionedOptimizer):
        _add_groups(name, to_state_dict(optimizer.param_groups, {})["param_groups"], into, numbering)
        _capture_partitioned(name, optimizer, into, numbers)
        return
    for key, value in optimizer.state_dict().items():
        if key == "param_groups":
            _add_groups(name, value, into, numbering)
        elif key != "state":
            into.add_tree(join(name, key), value)
        else:
            for index, values in value.items():
                is_known = isinstance(index, int) and index < len(parameters)
                parameter, number = (parameters[index], numbers[index]) if is_known else (None, index)
                if not isinstance(values, Mapping) or not values:
                    into.add_tree(join(name, "state", number), values)
                    continue
                for what, each in values.items():
                    full = join(name, "state", number, what)
                    if parameter is not None and (numbering is not None or slice_of(parameter) is not None):
                        _offer(full, each, parameter, into)
                    else:
                        into.add_tree(full, each)


def _add_groups(name: str, groups: list[dict[str, Any]], into: Captured, numbering: Numbering | None) -> None:
    into.add_tree(join(name, "param_groups"), groups if numbering is None else numbering.of_all(groups))


def _offer(name: str, value: object, parameter: torch.Tensor, into: Captured) -> None:
    """Adds what an optimizer keeps for a parameter that some ranks have, or have parts of."""
    tensors: dict[str, torch.Tensor] = {}
    taken = take_apart(name, value, tensors)
    if not isinstance(value, torch.Tensor):
        into.values[name] = taken
    for each, tensor in tensors.items():
        require_dense(each, tensor)
        if is_part(tensor, parameter, each):
            into.offer(part_of(each, tensor, shape_of(parameter), region_of(parameter)))
        else:
            into.offer(whole_of(each, tensor.detach()))


def _capture_partitioned(name: str, optimizer: PartitionedOptimizer, into: Captured, numbers: list[int]) -> None:
    counts = is_first_of(parameters_of(optimizer))
    for place, shard, values in optimizer.own_parts():
        mine = slice_of(shard.param)
        for key, value in values.items():
            full = join(name, "state", numbers[place], key)
            is_of_elements = isinstance(value, torch.Tensor) and value.shape == shard.run_shape
            if isinstance(value, torch.Tensor) and is_of_elements and not (shard.is_whole and mine is None):
                if counts or mine is not None:
                    into.hold(held_of_shard(full, shard, value))
            elif shard.is_first_part and (counts if mine is None else mine.group.rank() == 0):
                if isinstance(value, torch.Tensor) and mine is not None:
                    is_part(value, shard.param, full)
                into.hold_tree(full, value)


def own_groups(
    groups: list[Mapping[str, Any]], optimizer: Optimizer, numbering: Numbering | None
) -> list[dict[str, Any]]:
    """Returns the groups of the whole model's optimizer with this rank's parameters only."""
    return [dict(each) for each in groups] if numbering is None else numbering.own_of(groups, optimizer)


def own_state_dict(
    name: str, found: Mapping[str, Any], optimizer: Optimizer, numbering: Numbering | None
) -> dict[str, Any]:
    """Returns what this rank has of the `state_dict` of a whole model's optimizer.

    Raises:
        CheckpointError: it is that of another model.
        TypeError: the optimizer is a ZeRO's, whose parts of parts only a checkpoint of Paceline's has.
    """
    if isinstance(optimizer, PartitionedOptimizer):
        raise TypeError(
            f"{name!r} is a {type(optimizer).__name__} of a divided model, into which only a checkpoint that "
            "paceline.save wrote can be loaded. Load the file into the undivided model's optimizer first, and save that"
        )
    groups = own_groups(list(found["param_groups"]), optimizer, numbering)
    keys = list(chain.from_iterable(group["params"] for group in groups))
    state = {}
    for key, parameter in zip(keys, parameters_of(optimizer), strict=False):  # other lengths are refused in loading
        if key in found["state"]:
            kept = found["state"][key]
            state[key] = {
                what: _own_part(each, parameter, join(name, "state", key, what)) for what, each in kept.items()
            }
    return {**found, "state": state, "param_groups": groups}


def _own_part(value: object, parameter: torch.Tensor, name: str) -> object:
    is_of_elements = isinstance(value, torch.Tensor) and tuple(value.shape) == shape_of(parameter)
    return part_of_saved(value, parameter, name) if isinstance(value, torch.Tensor) and is_of_elements else value
