"""Converts optimizer states between the unsharded optimizer's format and the format of one rank's part.

The module also gathers the parts on one rank, without pickle, and loads states without rounding them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.comm.group.collectives.object_collectives import gather_object
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CollectiveObjectError
from paceline.train.zero.shards import Shard

StateByIndex = dict[int, dict[str, object]]
Group = dict[str, Any]

_STEP = "step"  # the only scalar whose dtype torch preserves when loading
_ONLY_PLAIN = "Use an optimizer whose state consists of tensors, numbers, strings and None"
_WHOLE_ONLY = ("params", "param_names")  # group keys that are not copied to a rank's part


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a `state_dict` into the optimizer; scalars keep the dtypes that they have in the state.

    Torch converts all scalars except the number of steps to the parameter's dtype. If the parameter is bfloat16, this
    conversion rounds the float32 scalars in NAdam and ASGD.
    """
    optimizer.load_state_dict(state)
    if "param_groups" not in state or not isinstance(state.get("state"), Mapping):
        return  # a third-party optimizer may use another state format
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, param in zip(numbers, params, strict=False):
        saved, own = state["state"].get(number), optimizer.state.get(param)
        if isinstance(saved, Mapping) and isinstance(own, dict):
            for key, value in saved.items():
                loaded = own.get(key)
                if key == _STEP or not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                    continue
                if value.dim() == 0 and value.dtype != loaded.dtype:
                    own[key] = value.to(loaded.device, copy=True)


def gather_state(mine: Mapping[int, Mapping[str, object]], group: ProcessGroup, to: int) -> StateByIndex | None:
    """Gathers the states of all ranks' shards, by shard number, on group rank `to`; returns None on other ranks.

    The gathered tensors are on the CPU, because a device that holds one rank's part may not have enough memory for all
    parts.

    Raises:
        TypeError: a state has a value that cannot be sent without pickle; raised on every rank.
    """
    on_cpu = {index: {name: _sendable(value) for name, value in state.items()} for index, state in mine.items()}
    gathered: list[StateByIndex] | None = [{} for _ in group.ranks] if group.rank() == to else None
    try:
        gather_object(on_cpu, gathered, group=group, group_dst=to)
    except CollectiveObjectError as error:
        raise TypeError(f"consolidate_state_dict: {error}. {_ONLY_PLAIN}") from error
    except TypeError as error:
        unknown = [(name, value) for state in on_cpu.values() for name, value in state.items() if not _is_plain(value)]
        what = f"{unknown[0][0]!r} of type {type(unknown[0][1]).__name__}" if unknown else "a value"
        rank = group.ranks[group.rank()]
        raise TypeError(f"consolidate_state_dict: rank {rank} has a state with {what}. {_ONLY_PLAIN}") from error
    if gathered is None:
        return None
    return dict(sorted(chain.from_iterable(state.items() for state in gathered), key=itemgetter(0)))


def _sendable(value: object) -> object:
    """Returns a tensor as a plain tensor on the CPU, and an instance of a subclass of int as an int."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).cpu()
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor | int | float | str | list | tuple | dict | set)


def copy_options(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Copies options, such as learning rates, from the groups in `source` to the groups in `target`."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(options_of(from_group))


def to_state_dict(groups: Sequence[Group], state: StateByIndex) -> dict[str, Any]:
    """Builds the `state_dict` of the unsharded optimizer."""
    numbers = count()
    packed = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [next(numbers) for _ in group["params"]]}
        for group in groups
    ]
    return {"state": state, "param_groups": packed}


def part_of_state_dict(
    state_dict: Mapping[str, Any], groups: Sequence[Group], shards: Sequence[Sequence[Shard]]
) -> dict[str, Any]:
    """Extracts, from an unsharded optimizer's `state_dict`, the part that this rank's optimizer loads.

    `shards` contains the shards of each parameter, in the order of the parameter groups `groups` of this optimizer.

    Raises:
        ValueError: the state has groups of different sizes.
    """
    saved = state_dict["param_groups"]
    _require_same_groups(saved, groups)
    keys = chain.from_iterable(group["params"] for group in saved)
    states = [
        {name: _part(value, shard) for name, value in state_dict["state"].get(key, {}).items()}
        for key, parts in zip(keys, shards, strict=True)
        for shard in parts
        if shard.is_mine
    ]
    return state_dict_of_parts(saved, states, groups, shards)


def state_dict_of_parts(
    saved: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, object]],
    groups: Sequence[Group],
    shards: Sequence[Sequence[Shard]],
) -> dict[str, Any]:
    """Builds, from the states of this rank's shards, the `state_dict` that this rank's optimizer loads.

    `saved` contains the groups of the unsharded optimizer, and `states` the state of each of this rank's shards, in the
    order of the parameters. For `groups`, `shards` and errors, see `part_of_state_dict`.
    """
    _require_same_groups(saved, groups)
    numbers, remaining = count(), iter(shards)
    packed = []
    for group in saved:
        own = [shard for parts in islice(remaining, len(group["params"])) for shard in parts if shard.is_mine]
        packed.append({**options_of(group), "params": [next(numbers) for _ in own]})
    return {"state": {i: dict(values) for i, values in enumerate(states) if values}, "param_groups": packed}


def _require_same_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> None:
    seen, expected = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if seen != expected:
        raise ValueError(
            f"the state has parameter groups of {seen} parameters, and this optimizer has groups of {expected}; load "
            "the state of an optimizer with the same groups"
        )


def join_parts(state: StateByIndex, shards: Sequence[Sequence[Shard]]) -> StateByIndex:
    """Combines the states of shards, by shard number, into the states of parameters, by index in `shards`."""
    joined: StateByIndex = {}
    number = 0
    for index, parts in enumerate(shards):
        found = [state[i] for i in range(number, number + len(parts)) if i in state]
        number += len(parts)
        if found:
            joined[index] = {
                name: _whole([values[name] for values in found], parts) if len(parts) > 1 else found[0][name]
                for name in found[0]
            }
    return joined


def _part(value: object, shard: Shard) -> object:
    """Copies a shard's part of a value, because the optimizer modifies its state while the caller may use the value."""
    if not isinstance(value, torch.Tensor):
        return value
    return (shard.run_of_any(value) if value.shape == shard.shape else value).clone()


def _whole(values: Sequence[object], shards: Sequence[Shard]) -> object:
    whole = None
    for value, shard in zip(values, shards, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != shard.run_shape:
            return value  # a value such as the number of steps is the same for all shards
        if whole is None:
            whole = torch.empty_strided(shard.shape, shard.strides, dtype=value.dtype, device=value.device)
        shard.run(whole).copy_(value)
    return whole


def options_of(group: Mapping[str, Any]) -> Group:
    """Returns the entries of a parameter group, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _WHOLE_ONLY}
