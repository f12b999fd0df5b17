"""The numbers of parameters in the optimizer of the whole model, where each rank's optimizer has those of its layers.

An optimizer's state is kept by the number of the parameter. The optimizers of a pipeline's ranks count their own, so
the ranks agree on what the optimizer of the undivided model would count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.parallel.pipeline.whole import place_of

Outline = dict[str, list[list[int]]]
"""For each optimizer of a pipeline the places of this rank's parameters in the whole model, by groups."""


class Numbering:
    """The parameters of all ranks' optimizers, counted as that of the undivided model counts them.

    Args:
        groups: the places of the parameters in the model, for each group of the optimizer.

    >>> numbering = Numbering([[0, 2, 3], [1]])
    >>> numbering.of([3, 1])
    [2, 3]
    >>> numbering.groups
    [[0, 1, 2], [3]]
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._number_of = {place: number for number, place in enumerate(chain.from_iterable(groups))}
        self.groups = [self.of(places) for places in groups]

    def of(self, places: Sequence[int]) -> list[int]:
        """Returns the numbers of the parameters at these places of the model."""
        return [self._number_of[place] for place in places]

    def of_own(self, optimizer: Optimizer) -> list[list[int]]:
        """Returns the numbers of this rank's parameters, for each group."""
        return [self.of(places) for places in _places(optimizer)]

    def of_all(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns this rank's groups as those of the undivided model's optimizer."""
        return [
            {**_without_names(group), "params": list(all_of_it)}
            for group, all_of_it in zip(groups, self.groups, strict=True)
        ]

    def own_of(self, groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns the groups of the undivided model's optimizer with this rank's parameters only.

        Raises:
            CheckpointError: they are those of another model.
        """
        saved, here = ([len(each) for each in many] for many in ([group["params"] for group in groups], self.groups))
        if saved != here:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {saved} parameters, and those of all ranks have groups of "
                f"{here}; load it into the optimizer of the same model with the same groups"
            )
        own = self.of_own(optimizer)
        return [{**_without_names(group), "params": numbers} for group, numbers in zip(groups, own, strict=True)]


def outline_of(entries: Iterable[tuple[str, object]]) -> bytes:
    """Returns what the other ranks must know of this rank's optimizers, given its objects by name.

    Raises:
        TypeError: an optimizer has parameters of a pipeline and others besides.
    """
    outline: Outline = {}
    for name, value in entries:
        if not isinstance(value, Optimizer):
            continue
        parameters = [each for group in value.param_groups for each in group["params"]]
        divided = [place_of(each) is not None for each in parameters]
        if any(divided) and not all(divided):
            raise TypeError(
                f"{name!r} has parameters of a Pipeline and others that do not belong to it; give them optimizers of "
                "their own"
            )
        if any(divided):
            outline[name] = _places(value)
    return json.dumps(outline).encode()


def agreed(outlines: Sequence[bytes]) -> dict[str, Numbering]:
    """Returns the numbering of each optimizer of a pipeline, given what all ranks have.

    Raises:
        CheckpointError: the ranks have other optimizers, or other groups.
    """
    everyone: list[Outline] = [json.loads(each) for each in outlines]
    for rank, outline in enumerate(everyone):
        for name, groups in everyone[0].items():
            seen = outline.get(name)
            if seen is None or len(seen) != len(groups):
                found = "no such optimizer of a Pipeline" if seen is None else f"{len(seen)} parameter groups"
                raise CheckpointError(
                    f"{name!r} is an optimizer of a Pipeline with {len(groups)} parameter groups on rank 0 of the "
                    f"group, and rank {rank} has {found}; make it alike on all ranks, with empty groups where a rank "
                    "has no such parameters, and call this on all ranks of the mesh"
                )
        if more := sorted(outline.keys() - everyone[0].keys()):
            raise CheckpointError(
                f"{more[0]!r} is an optimizer of a Pipeline on rank {rank} of the group, and not on rank 0; every rank "
                "must have the same names in the state"
            )
    return {name: Numbering(_joined(name, [each[name] for each in everyone])) for name in everyone[0]}


def _joined(name: str, everyone: Sequence[list[list[int]]]) -> list[list[int]]:
    groups = [sorted(set(chain.from_iterable(each))) for each in zip(*everyone, strict=True)]
    listed = list(chain.from_iterable(groups))
    if len(set(listed)) != len(listed):
        twice = next(each for each in listed if listed.count(each) > 1)
        raise CheckpointError(
            f"parameter {twice} of the model is in several groups of the optimizer {name!r}, on different ranks; the "
            "ranks that have the same layers must group their parameters alike"
        )
    return groups


def _places(optimizer: Optimizer) -> list[list[int]]:
    found = [[place_of(each) for each in group["params"]] for group in optimizer.param_groups]
    return [[each.number for each in group if each is not None] for group in found]


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
