"""How optimizers take over what a checkpoint has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.checkpoint.divided import (
    parameters_of,
    parts_of_shard,
    region_of,
    region_of_shard,
    shape_of,
    shape_of_shard,
)
from paceline.checkpoint.filling import Filling, number_of
from paceline.checkpoint.names import SEPARATOR, join, unescaped
from paceline.checkpoint.numbering import Numbering
from paceline.checkpoint.optimizers import own_groups
from paceline.errors import CheckpointError
from paceline.parallel.optimizer_state import load_optimizer
from paceline.parallel.tensor.slices import slice_of
from paceline.parallel.zero.partitioned import PartitionedOptimizer
from paceline.parallel.zero.shards import Shard

Later = Callable[[], Any]
"""Returns something when everything has been read."""


class RestoringOptimizers:
    """Asks for what optimizers need, and puts it in when it has been read.

    Args:
        filling: what is wanted of the checkpoint.
        numberings: of the optimizers of pipelines, by their names.
    """

    def __init__(self, filling: Filling, numberings: Mapping[str, Numbering]) -> None:
        self._filling, self._numberings = filling, numberings

    def want(self, name: str, optimizer: Optimizer) -> None:
        """Asks for the state of an optimizer.

        Raises:
            CheckpointError: what was saved is none.
        """
        if not self._filling.has(join(name, "param_groups")):
            raise CheckpointError(
                f"{name!r} is an optimizer here, and something else in {self._filling.checkpoint.describe()}; load it "
                "into what it was saved from, or into None to be given what was saved"
            )
        numbering = self._numberings.get(name)
        if isinstance(optimizer, PartitionedOptimizer):
            self._want_partitioned(name, optimizer, numbering)
        else:
            self._want_usual(name, optimizer, numbering)

    def _want_usual(self, name: str, optimizer: Optimizer, numbering: Numbering | None) -> None:
        parameters = parameters_of(optimizer)
        numbers = _numbers(optimizer, numbering)
        parameter_of: dict[object, torch.Tensor] = dict(zip(numbers, parameters, strict=True))
        trees: dict[str, Later] = {}
        states: dict[object, dict[object, Later]] = {}
        undivided: dict[object, Later] = {}
        for rest, full in self._filling.names_below(name).items():
            keys = [unescaped(each) for each in rest.split(SEPARATOR)]
            if keys[0] == "state" and len(keys) in (2, 3):
                number = number_of(keys[1])
                if numbering is not None and number not in parameter_of:
                    continue
                kept = self._kept(full, parameter_of.get(number), by_all=numbering is None)
                if len(keys) == 2:
                    undivided[number] = kept
                else:
                    states.setdefault(number, {})[keys[2]] = kept
            elif len(keys) == 1:
                trees[keys[0]] = self._filling.tree(full)

        def load() -> None:
            state: dict[object, Any]
            state = {number: {key: tree() for key, tree in each.items()} for number, each in states.items()}
            state.update({number: tree() for number, tree in undivided.items()})
            others = {key: tree() for key, tree in trees.items()}
            if "param_groups" in others:
                others["param_groups"] = own_groups(others["param_groups"], optimizer, numbering)
            load_optimizer(optimizer, {"state": state, **others})

        self._filling.finally_do(load)

    def _kept(self, name: str, parameter: torch.Tensor | None, *, by_all: bool) -> Later:
        """Asks for what an optimizer keeps for a parameter, of a divided one for this rank's part."""
        entry = self._filling.tensors.get(name)
        if entry is None or parameter is None or slice_of(parameter) is None or entry.shape != shape_of(parameter):
            return self._filling.tree(name, by_all=by_all)
        read = self._filling.region(name, region_of(parameter)).view(parameter.shape)
        return lambda: read

    def _want_partitioned(self, name: str, optimizer: PartitionedOptimizer, numbering: Numbering | None) -> None:
        groups = self._filling.tree(join(name, "param_groups"))
        numbers = _numbers(optimizer, numbering)
        states = [
            self._wanted_state(join(name, "state", numbers[place]), shard) for place, shard, _ in optimizer.own_parts()
        ]
        self._filling.finally_do(
            lambda: optimizer.load_own_parts(
                own_groups(groups(), optimizer, numbering),
                [{key: each() for key, each in state.items()} for state in states],
            )
        )

    def _wanted_state(self, name: str, shard: Shard) -> dict[str, Later]:
        wanted: dict[str, Later] = {}
        for rest, full in self._filling.names_below(name).items():
            if SEPARATOR in rest:
                continue
            entry = self._filling.tensors.get(full)
            if entry is None:
                wanted[unescaped(rest)] = self._filling.tree(full, by_all=False)
            elif entry.shape == shape_of_shard(shard) and entry.shape:
                wanted[unescaped(rest)] = _returning(self._elements_of(full, shard))
            else:
                wanted[unescaped(rest)] = _returning(self._filling.tensor(full, by_all=False))
        return wanted

    def _elements_of(self, name: str, shard: Shard) -> torch.Tensor:
        """Returns memory in which this shard's elements of a tensor of the undivided parameter's shape will be."""
        if shard.is_whole:
            return self._filling.region(name, region_of_shard(shard)).view(shard.shape)
        parts = parts_of_shard(shard)
        if len(parts) == 1 and len(parts[0].in_memory) == 1:
            return self._filling.region(name, parts[0].region)
        reads = [self._filling.region(name, part.region) for part in parts]
        run = torch.empty(shard.run_shape, dtype=reads[0].dtype)
        for part, read in zip(parts, reads, strict=True):
            self._filling.finally_do(filling_run(part.fill, run, read))
        return run


def filling_run(fill: Callable[[torch.Tensor, torch.Tensor], None], run: torch.Tensor, read: torch.Tensor) -> Later:
    """Returns what puts elements that were read into a run."""

    def work() -> None:
        with torch.no_grad():
            fill(run, read)

    return work


def _numbers(optimizer: Optimizer, numbering: Numbering | None) -> list[int]:
    """Returns the numbers of this rank's parameters in the optimizer of the whole model."""
    if numbering is None:
        return list(range(len(parameters_of(optimizer))))
    return list(chain.from_iterable(numbering.of_own(optimizer)))


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor
