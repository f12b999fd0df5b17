"""Parameter groups and states, between the whole optimizer and the part of it that a rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.parallel.zero.consolidate import State

Group = dict[str, Any]

_WHOLE_ONLY = ("params", "param_names")


def part_of_group(group: Group, owned: Sequence[torch.Tensor]) -> Group:
    """The group with only the parameters in `owned`."""
    return {**_options(group), "params": list(owned)}


def copy_options(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Sets learning rates and the like of `target` to those of `source`."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(_options(from_group))


def to_state_dict(groups: Sequence[Group], state: State) -> dict[str, Any]:
    """What the unsharded optimizer's `state_dict` is."""
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
    state_dict: Mapping[str, Any], groups: Sequence[Group], owners: Sequence[int], rank: int
) -> dict[str, Any]:
    """What the optimizer of one rank loads, from the `state_dict` of an unsharded one.

    Args:
        owners: of the parameters of all groups, one after the other.

    Raises:
        ValueError: the groups do not fit.
    """
    saved = state_dict["param_groups"]
    seen, expected = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if seen != expected:
        raise ValueError(
            f"the state has parameter groups of {seen} parameters, this optimizer has {expected}; load the state of an "
            "optimizer with the same groups"
        )
    state: State = {}
    packed: list[Group] = []
    place = first = 0
    for group in saved:
        owned: list[int] = []
        for key in group["params"]:
            if owners[place] == rank:
                if key in state_dict["state"]:
                    values = state_dict["state"][key].items()
                    # A copy, since the optimizer will write to it: the other one goes on with its own.
                    state[first + len(owned)] = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values}
                owned.append(first + len(owned))
            place += 1
        first += len(owned)
        packed.append({**_options(group), "params": owned})
    return {"state": state, "param_groups": packed}


def _options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _WHOLE_ONLY}
