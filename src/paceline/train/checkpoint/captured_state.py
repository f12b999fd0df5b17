"""CapturedState: a rank's contribution to a checkpoint, before anything is copied or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from paceline.train.checkpoint.format.regions import Region, count, cut_out, whole
from paceline.train.checkpoint.pytree import name_of, take_apart


@dataclass(frozen=True)
class LocalRegion:
    """A region of a tensor in this rank's memory.

    Attributes:
        name: the name of the tensor.
        dtype: the safetensors name of the tensor's dtype.
        shape: the shape of the whole tensor.
        region: the location of the elements in the whole tensor.
        nbytes: the size of the region in bytes.
        elements: a function that returns the elements, row-major and contiguous. It copies them only when called, if at
            all.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    nbytes: int
    elements: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class CapturedObject:
    """The state of an object that may differ between ranks.

    Attributes:
        state: the complete state, including tensors.
        value: the state without its tensors.
        tensors: the tensors in the state, by name.
        is_everywhere: whether every rank has the object. False if only the ranks of a pipeline stage have it.
    """

    state: object
    value: object
    tensors: Mapping[str, torch.Tensor]
    is_everywhere: bool = True


class OfferedRegion(NamedTuple):
    """A region that this rank has and other ranks may also have.

    Attributes:
        held: the region in this rank's memory.
        of_first: whether the elements may differ between ranks. If so, those on the first rank are saved.
    """

    held: LocalRegion
    of_first: bool = False


@dataclass
class CapturedState:
    """The state of a training loop on one rank.

    Attributes:
        is_first: whether this is rank 0, whose buffers and loader positions are saved.
        everywhere: the tensors that are the same on every rank.
        held: the tensor regions that only this rank contributes.
        offered: the tensor regions of a divided model that other ranks may also have.
        values: the plain values that are the same on every rank, or that only this rank has.
        objects: the objects that are compared between ranks, and saved separately for each rank if they differ.
        layers: the names of this rank's layers and the total number of layers, by pipeline name.
    """

    is_first: bool = True
    everywhere: dict[str, torch.Tensor] = field(default_factory=dict)
    held: list[LocalRegion] = field(default_factory=list)
    offered: list[OfferedRegion] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    objects: dict[str, CapturedObject] = field(default_factory=dict)
    layers: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that is the same on every rank."""
        require_dense(name, tensor)
        self.everywhere[name] = tensor.detach()

    def add_of_first(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that may differ between ranks. The tensor on rank 0 is saved."""
        require_dense(name, tensor)
        if self.is_first:
            self.held.append(whole_of(name, tensor.detach()))

    def offer(self, held: LocalRegion, *, of_first: bool = False) -> None:
        """Adds a tensor region that other ranks may also have."""
        if _is_needed(held):
            self.offered.append(OfferedRegion(held, of_first))

    def hold(self, held: Sequence[LocalRegion]) -> None:
        """Adds tensor regions that only this rank contributes."""
        self.held += filter(_is_needed, held)

    def add_tree(self, name: str, value: object) -> None:
        """Adds a tree of tensors and plain values that is the same on every rank."""
        self.everywhere |= {full: tensor.detach() for full, tensor in self.add_values(name, value).items()}

    def add_values(self, name: str, value: object) -> dict[str, torch.Tensor]:
        """Adds the plain values of a tree, and returns its tensors by name."""
        tensors: dict[str, torch.Tensor] = {}
        taken = take_apart(name, value, tensors)
        if not isinstance(value, torch.Tensor):
            self.values[name] = taken
        for full, tensor in tensors.items():
            require_dense(full, tensor)
        return tensors

    def hold_tree(self, name: str, value: object) -> None:
        """Adds a tree that only this rank contributes."""
        self.held += [whole_of(full, tensor.detach()) for full, tensor in self.add_values(name, value).items()]

    def add_object(self, name: str, state: object, *, is_everywhere: bool = True) -> None:
        """Adds a tree that may differ between ranks."""
        tensors: dict[str, torch.Tensor] = {}
        value = take_apart(name, state, tensors)
        for full, tensor in tensors.items():
            require_dense(full, tensor)
        self.objects[name] = CapturedObject(state, value, tensors, is_everywhere)


def _is_needed(held: LocalRegion) -> bool:
    """Returns True if a region must be saved. An empty region is saved only if the whole tensor is empty."""
    return held.nbytes > 0 or prod(held.shape) == 0


def whole_of(name: str, tensor: torch.Tensor) -> LocalRegion:
    """Returns the region that covers a whole tensor."""
    shape = tuple(tensor.shape)
    return LocalRegion(name, name_of(tensor.dtype), shape, whole(shape), tensor.nbytes, lambda: flat(tensor))


def cut(held: LocalRegion, start: int, stop: int) -> list[LocalRegion]:
    """Returns the regions that make up bytes `start` to `stop` of a region, both multiples of the element size."""
    if (start, stop) == (0, held.nbytes):
        return [held]
    size = held.nbytes // count(held.region)
    parts: list[LocalRegion] = []
    first = start // size
    for region in cut_out(held.region, first, stop // size):
        parts.append(_section(held, region, first, first + count(region)))
        first += count(region)
    return parts


def _section(held: LocalRegion, region: Region, first: int, last: int) -> LocalRegion:
    nbytes = (last - first) * (held.nbytes // count(held.region))
    return replace(held, region=region, nbytes=nbytes, elements=lambda: held.elements()[first:last])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in row-major order, and copies them only if their order in memory differs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Checks that a checkpoint can hold a tensor.

    Raises:
        TypeError: the tensor is sparse, quantized or distributed by another library, or has an unsupported dtype.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(
            f"{name!r} is a {kind} tensor; a checkpoint can only contain dense tensors. Save tensor.to_dense() instead"
        )
    if hasattr(tensor, "_local_tensor") or hasattr(tensor, "local_shards"):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, which torch.distributed has distributed over processes; save it "
            "with torch.distributed.checkpoint, which paceline.load can read"
        )
    name_of(tensor.dtype)
