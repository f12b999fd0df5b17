"""What a rank wants of a checkpoint, and where it is to be put."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.element_types import type_of
from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.regions import Flat, Region, count, whole
from paceline.checkpoint.format.values import TensorRef, decode
from paceline.checkpoint.names import SEPARATOR, of_rank, unescaped
from paceline.checkpoint.sources import Elsewhere
from paceline.checkpoint.trees import put_together
from paceline.errors import CheckpointError
from paceline.group.writes import count_writes

_AFTER_SEPARATOR = chr(ord(SEPARATOR) + 1)


@dataclass(frozen=True)
class Wanted:
    """A region of a tensor, and the memory for it: elements of the saved type in one piece on the CPU.

    `by_all` says that every rank wants the same, so that it is read once and sent to the others.
    """

    name: str
    region: Region
    memory: torch.Tensor
    by_all: bool


class Filling:
    """Collects what is wanted; when it has been read, `finish` puts everything where it belongs.

    Args:
        checkpoint: where it is read from.
        rank: this rank.
    """

    def __init__(self, checkpoint: Checkpoint | Elsewhere, rank: int) -> None:
        self.checkpoint = checkpoint
        self.tensors = checkpoint.manifest.tensors
        if not isinstance(checkpoint.manifest.values, dict):
            raise CheckpointError(f"{checkpoint.describe()} was not saved by paceline.save: its values have no names")
        self.values = checkpoint.manifest.values
        self.wanted: list[Wanted] = []
        self._names = sorted({*self.tensors, *self.values})
        self._rank = rank
        self._last: list[Callable[[], None]] = []

    def names_below(self, name: str) -> dict[str, str]:
        """Returns the names of tensors and values within `name`, by the rest of them."""
        first, stop = (bisect.bisect_left(self._names, name + end) for end in (SEPARATOR, _AFTER_SEPARATOR))
        return {each[len(name) + 1 :]: each for each in self._names[first:stop]}

    def has(self, name: str) -> bool:
        """Whether there is anything of that name, or within it."""
        known = (self.tensors, self.values)
        return any(each in names for names in known for each in self._own(name)) or bool(self.names_below(name))

    def top_names(self) -> list[str]:
        """Returns the names of what was saved, without what is within it."""
        return sorted({each.partition(SEPARATOR)[0].partition("@")[0] for each in self._names})

    def finally_do(self, work: Callable[[], None]) -> None:
        """Has `work` done when everything has been read."""
        self._last.append(work)

    def finish(self) -> None:
        """Does what was to be done when everything has been read."""
        count_writes(each.memory for each in self.wanted)
        for work in self._last:
            work()

    def into(
        self,
        name: str,
        target: torch.Tensor,
        *,
        shape: tuple[int, ...] | None = None,
        region: Region | None = None,
        by_all: bool = True,
    ) -> None:
        """Wants a tensor, or a part of it, to be put into `target`.

        Args:
            shape: of the whole tensor, if `target` is not all of it.
            region: which part of it `target` is.
            by_all: whether all ranks want the same.

        Raises:
            CheckpointError: the checkpoint has it with another shape, or it is no tensor there.
        """
        if (saved := self.tensors.get(name)) is None:
            raise CheckpointError(
                f"{name!r} is a tensor here, and something else in {self.checkpoint.describe()}; load it into what it "
                "was saved from, or into None to be given what was saved"
            )
        shape = tuple(target.shape) if shape is None else shape
        region = whole(shape) if region is None else region
        if shape != saved.shape:
            raise CheckpointError(
                f"{name!r} has the shape {list(saved.shape)} in {self.checkpoint.describe()}, and "
                f"{list(shape)} here; load it into the same model, or leave it out"
            )
        dtype = type_of(saved.dtype)
        if target.dtype == dtype and target.is_cpu and target.is_contiguous():
            self.wanted.append(Wanted(name, region, target.detach().view(-1), by_all))
            return
        read = self.region(name, region, by_all=by_all)

        def copy() -> None:
            with torch.no_grad():
                target.copy_(read.view(target.shape))

        self.finally_do(copy)

    def region(self, name: str, region: Region, *, by_all: bool = False) -> torch.Tensor:
        """Returns memory in which the elements of a region will be."""
        try:
            memory = torch.empty(count(region), dtype=type_of(self.tensors[name].dtype), device="cpu")
        except RuntimeError as error:  # torch's, for want of memory
            raise CheckpointError(
                f"{name!r} in {self.checkpoint.describe()} has {count(region):,} elements, for which this process "
                f"cannot get memory: {error}"
            ) from None
        self.wanted.append(Wanted(name, region, memory, by_all))
        return memory

    def tensor(self, name: str, *, by_all: bool = True) -> torch.Tensor:
        """Returns memory in which the tensor will be, in its shape."""
        shape = self.tensors[name].shape
        return self.region(name, whole(shape), by_all=by_all).view(shape)

    def tree(self, name: str, *, by_all: bool = True) -> Callable[[], Any]:
        """Returns a function that returns the tree of that name when everything has been read.

        If each rank kept its own, it is this rank's, or the first one's if there is none of this rank. `by_all` is
        whether all ranks want the same if it is one for all. What was saved in parts, such as a module or a dict of
        tensors, is a dict of them: what its `state_dict` returned, or the dict.

        Raises:
            CheckpointError: there is nothing of that name.
        """
        known = next((each for each in self._own(name) if each in self.values or each in self.tensors), None)
        if known is None:
            return self._parts(name, by_all)
        by_all = by_all and known == name
        if known in self.tensors and known not in self.values:
            tensor = self.tensor(known, by_all=by_all)
            return lambda: tensor
        value = decode(self.values[known])
        found: dict[str, torch.Tensor] = {}
        for each in _references(value):
            found[each] = self.tensor(each, by_all=by_all)
        return lambda: put_together(value, found.__getitem__)

    def _parts(self, name: str, by_all: bool) -> Callable[[], dict[object, Any]]:
        keys = {rest.partition(SEPARATOR)[0].partition("@")[0] for rest in self.names_below(name)}
        inner = {key: f"{name}{SEPARATOR}{key}" for key in sorted(keys)}
        trees = {key: self.tree(full, by_all=by_all) for key, full in inner.items() if self.has(full)}
        if not trees:
            raise CheckpointError(f"{self.checkpoint.describe()} has no {name!r} for rank {self._rank} of the group")
        return lambda: _with_numbers({unescaped(key): tree() for key, tree in trees.items()})

    def _own(self, name: str) -> list[str]:
        return [of_rank(name, self._rank), name, of_rank(name, 0)]


def _with_numbers(state: dict[object, Any]) -> dict[object, Any]:
    """Returns a state; if it is an optimizer's, by the numbers of its parameters, of which names are texts."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) and "params" in each for each in groups):
        return state
    return {**state, "state": {number_of(key): each for key, each in state.get("state", {}).items()}}


def number_of(key: str) -> int | str:
    """Returns a parameter's number in an optimizer's state, given it as a text; other keys as they are."""
    return int(key) if key.isdigit() else key


def _references(value: object) -> list[str]:
    if isinstance(value, TensorRef):
        return [value.name]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for each in value for name in _references(each)] if isinstance(value, (list, tuple)) else []


def pieces_of(wanted: Wanted, filling: Filling, unit_nbytes: int) -> list[tuple[int, int]]:
    """Returns the bytes of a wanted whole tensor, in order, in parts that one rank reads as it likes.

    They begin where pieces of the file do and are as long as the blocks that have digests, so that no block is read
    twice.
    """
    entry = filling.tensors[wanted.name]
    size = wanted.memory.element_size()
    total = wanted.memory.numel() * size
    flat = [each.region for each in entry.pieces]
    if not all(isinstance(each, Flat) for each in flat):
        return [(0, total)]
    parts = []
    for each in sorted((each.start * size, each.stop * size) for each in flat if isinstance(each, Flat)):
        parts += [(start, min(start + unit_nbytes, each[1])) for start in range(each[0], each[1], unit_nbytes)]
    return parts or [(0, total)]
