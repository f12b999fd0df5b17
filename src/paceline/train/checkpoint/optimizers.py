"""Numbering: the parameter numbers of optimizers. A checkpoint holds an optimizer's state for the whole model.

An optimizer's state is keyed by parameter numbers. In a pipeline, each rank's optimizer numbers only its own
parameters, so the ranks agree on a `Numbering`, which maps each rank's numbers to those in the undivided model's
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.values import join
from paceline.train.checkpoint.shard_layout import ShardLayout, parameters_of
from paceline.train.pipeline.pipeline import index_in_model
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer

Outline = dict[str, list[list[int]]]
"""The positions of this rank's parameters in the whole model, by pipeline optimizer and parameter group."""


class Numbering:
    """The parameter numbers in the undivided model's optimizer.

    `groups` contains, for each parameter group, the positions of all ranks' parameters in the model.

    >>> numbering = Numbering([[0, 2, 3], [1]])
    >>> numbering.of([3, 1])
    [2, 3]
    >>> numbering.groups
    [[0, 1, 2], [3]]
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._number_of = {position: number for number, position in enumerate(chain.from_iterable(groups))}
        self.groups = [self.of(positions) for positions in groups]

    def of(self, positions: Sequence[int]) -> list[int]:
        """Returns the numbers of the parameters at these positions in the model."""
        return [self._number_of[position] for position in positions]

    def of_own(self, optimizer: Optimizer) -> list[list[int]]:
        """Returns the numbers of this rank's parameters for each group."""
        return [self.of(positions) for positions in _positions(optimizer)]

    def of_all(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Converts this rank's parameter groups to those of the undivided model's optimizer."""
        return [
            {**_without_names(group), "params": list(numbers)}
            for group, numbers in zip(groups, self.groups, strict=True)
        ]

    def own_of(self, groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
        """Restricts the parameter groups of the undivided model's optimizer to this rank's parameters."""
        saved, here = [len(group["params"]) for group in groups], [len(numbers) for numbers in self.groups]
        if saved != here:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {saved} parameters, and those of all ranks have groups of "
                f"{here}; load it into the optimizer of the same model with the same groups"
            )
        own = self.of_own(optimizer)
        return [{**_without_names(group), "params": numbers} for group, numbers in zip(groups, own, strict=True)]


def outline_of(entries: Iterable[tuple[str, object]]) -> Outline:
    """Returns the outline of this rank's optimizers, given its objects by name."""
    outline: Outline = {}
    for name, value in entries:
        if not isinstance(value, Optimizer):
            continue
        divided = [index_in_model(parameter) is not None for parameter in parameters_of(value)]
        if any(divided) and not all(divided):
            raise TypeError(
                f"{name!r} has parameters of a Pipeline and others that do not belong to it; give those a separate "
                "optimizer"
            )
        if any(divided):
            outline[name] = _positions(value)
    return outline


def agreed(from_all: Sequence[Outline]) -> dict[str, Numbering]:
    """Returns the numbering for each pipeline optimizer, given the outlines of all ranks."""
    for rank, outline in enumerate(from_all):
        for name, groups in from_all[0].items():
            seen = outline.get(name)
            if seen is None or len(seen) != len(groups):
                found = "no such optimizer of a Pipeline" if seen is None else f"{len(seen)} parameter groups"
                raise CheckpointError(
                    f"{name!r} is an optimizer of a Pipeline with {len(groups)} parameter groups on rank 0 of the "
                    f"group, and rank {rank} has {found}; create it in the same way on all ranks, with empty groups "
                    "where a rank has no such parameters, and call this on all ranks of the mesh"
                )
        if more := sorted(outline.keys() - from_all[0].keys()):
            raise CheckpointError(
                f"{more[0]!r} is an optimizer of a Pipeline on rank {rank} of the group, and not on rank 0; every rank "
                "must have the same names in the state"
            )
    return {name: Numbering(_joined(name, [outline[name] for outline in from_all])) for name in from_all[0]}


def _joined(name: str, from_all: Sequence[list[list[int]]]) -> list[list[int]]:
    groups = [sorted(set(chain.from_iterable(groups))) for groups in zip(*from_all, strict=True)]
    listed = list(chain.from_iterable(groups))
    if len(set(listed)) != len(listed):
        twice = next(position for position in listed if listed.count(position) > 1)
        raise CheckpointError(
            f"parameter {twice} of the model is in several groups of the optimizer {name!r}, on different ranks; the "
            "ranks that have the same layers must group their parameters in the same way"
        )
    return groups


def _positions(optimizer: Optimizer) -> list[list[int]]:
    found = [[index_in_model(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return [[index.number for index in group if index is not None] for group in found]


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def own_groups(
    groups: list[Mapping[str, Any]], optimizer: Optimizer, numbering: Numbering | None
) -> list[dict[str, Any]]:
    """Restricts the parameter groups of the whole model's optimizer to this rank's parameters."""
    return [dict(group) for group in groups] if numbering is None else numbering.own_of(groups, optimizer)


def own_state_dict(
    name: str, found: Mapping[str, Any], optimizer: Optimizer, numbering: Numbering | None
) -> dict[str, Any]:
    """Returns this rank's part of a `state_dict` from the optimizer of the whole model."""
    if isinstance(optimizer, PartitionedOptimizer):
        raise TypeError(
            f"{name!r} is a {type(optimizer).__name__} of a divided model, into which only a checkpoint that "
            "paceline.save wrote can be loaded. Load the file into the undivided model's optimizer first, and save that"
        )
    groups = own_groups(list(found["param_groups"]), optimizer, numbering)
    keys = list(chain.from_iterable(group["params"] for group in groups))
    state = {}
    for key, parameter in zip(keys, parameters_of(optimizer), strict=False):  # loading rejects other lengths
        if key in found["state"]:
            layout = ShardLayout.of(parameter)
            state[key] = {
                part: layout.part_of_saved(kept, join(name, "state", key, part))
                if isinstance(kept, torch.Tensor) and tuple(kept.shape) == layout.shape
                else kept
                for part, kept in found["state"][key].items()
            }
    return {**found, "state": state, "param_groups": groups}
