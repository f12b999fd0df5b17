"""Converts parameter groups and states between the whole optimizer and the part of it that a rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.parallel.zero.consolidate import State
from paceline.parallel.zero.shards import Shard

Group = dict[str, Any]

_WHOLE_ONLY = ("params", "param_names")


def part_of_group(group: Group, owned: Sequence[torch.Tensor]) -> Group:
    """Returns the group with only the parameters in `owned`."""
    return {**_options(group), "params": list(owned)}


def copy_options(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Sets learning rates and the like of `target` to those of `source`."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(_options(from_group))


def to_state_dict(groups: Sequence[Group], state: State) -> dict[str, Any]:
    """Returns what the unsharded optimizer's `state_dict` would return."""
    packed: list[Group] = []
    first = 0
    for group in groups:
        count = len(group["params"])
        packed.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(range(first, first + count))}
        )
        first += count
    return {"state": state, "param_groups": packed}


def part_of_state_dict(
    state_dict: Mapping[str, Any], groups: Sequence[Group], shards: Sequence[Sequence[Shard]]
) -> dict[str, Any]:
    """Returns what this rank's optimizer must load, given the `state_dict` of an unsharded one.

    Args:
        state_dict: the whole state.
        groups: the parameter groups of this optimizer.
        shards: the shards of each parameter, in the order of the groups.

    Raises:
        ValueError: the state has groups of other sizes.
    """
    saved = state_dict["param_groups"]
    _require_same_groups(saved, groups)
    state: State = {}
    packed: list[Group] = []
    place = number = 0
    for group in saved:
        first = number
        for key in group["params"]:
            for shard in shards[place]:
                if shard.is_mine:
                    if key in state_dict["state"]:
                        state[number] = {name: _part(v, shard) for name, v in state_dict["state"][key].items()}
                    number += 1
            place += 1
        packed.append({**_options(group), "params": list(range(first, number))})
    return {"state": state, "param_groups": packed}


def state_dict_of_parts(
    saved: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, object]],
    groups: Sequence[Group],
    shards: Sequence[Sequence[Shard]],
) -> dict[str, Any]:
    """Returns what this rank's optimizer must load, given the states of its own shards.

    Args:
        saved: the groups of the unsharded optimizer.
        states: of each shard that is this rank's, in the order of the parameters.
        groups: the parameter groups of this optimizer.
        shards: the shards of each parameter, in the order of the groups.

    Raises:
        ValueError: the state has groups of other sizes.
    """
    _require_same_groups(saved, groups)
    packed: list[Group] = []
    place = number = 0
    for group in saved:
        first = number
        for _ in group["params"]:
            number += sum(shard.is_mine for shard in shards[place])
            place += 1
        packed.append({**_options(dict(group)), "params": list(range(first, number))})
    return {"state": {at: dict(values) for at, values in enumerate(states) if values}, "param_groups": packed}


def _require_same_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> None:
    seen, expected = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if seen != expected:
        raise ValueError(
            f"the state has parameter groups of {seen} parameters, and this optimizer has groups of {expected}; load "
            "the state of an optimizer with the same groups"
        )


def join_parts(state: State, shards: Sequence[Sequence[Shard]]) -> State:
    """Returns the states of parameters, given those of their shards by number.

    Args:
        state: the states of shards.
        shards: the shards of each parameter.
    """
    joined: State = {}
    number = 0
    for place, parts in enumerate(shards):
        found = [state[at] for at in range(number, number + len(parts)) if at in state]
        number += len(parts)
        if found:
            joined[place] = {
                name: _whole([each[name] for each in found], parts) if len(parts) > 1 else found[0][name]
                for name in found[0]
            }
    return joined


def _part(value: object, shard: Shard) -> object:
    """Returns a copy, since this optimizer will write to it, and the caller may go on using the original."""
    if not isinstance(value, torch.Tensor):
        return value
    return (shard.run_of_any(value) if value.shape == shard.shape else value).clone()


def _whole(values: Sequence[object], shards: Sequence[Shard]) -> object:
    whole = None
    for value, shard in zip(values, shards, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != shard.run_shape:
            return value  # such as the number of steps, which is the same for each shard
        if whole is None:
            whole = torch.empty_strided(shard.shape, shard.strides, dtype=value.dtype)
        shard.run(whole).copy_(value)
    return whole


def _options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _WHOLE_ONLY}
