"""What a rank contributes to a checkpoint, before anything is copied or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from paceline.train.checkpoint.format.regions import Region, count, cut_out, whole
from paceline.train.checkpoint.pytree import name_of, take_apart


@dataclass(frozen=True)
class LocalRegion:
    """A part of a tensor that this rank holds and no other writes; `elements` returns it, row-major and in one piece.

    Only `elements` looks at the memory, so that nothing is copied before it is needed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    nbytes: int
    elements: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class CapturedObject:
    """The state of something that need not be the same on every rank: whole, and taken apart.

    `is_everywhere` is false for what only some ranks have, such as those of a stage of a pipeline.
    """

    state: object
    value: object
    tensors: Mapping[str, torch.Tensor]
    is_everywhere: bool = True


@dataclass(frozen=True)
class OfferedRegion:
    """A part of a tensor that this rank has, and other ranks may have too.

    `of_first` says that the ranks' may differ, so that the first one's counts.
    """

    held: LocalRegion
    of_first: bool = False


@dataclass
class CapturedState:
    """The state of a training loop on one rank.

    Attributes:
        everywhere: tensors that are the same on every rank.
        held: parts of tensors that this rank alone contributes.
        offered: parts of tensors that some ranks have, of a model that is divided among ranks.
        values: plain values that are the same on every rank, or that this rank alone has.
        objects: what is compared between the ranks, and kept for each of them if it differs.
        layers: for each pipeline, by its name, the layers that this rank has, and how many there are.
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
        """Adds a tensor that may differ between ranks; that of the first one counts."""
        require_dense(name, tensor)
        if self.is_first:
            self.held.append(whole_of(name, tensor.detach()))

    def offer(self, held: LocalRegion, *, of_first: bool = False) -> None:
        """Adds a part of a tensor that other ranks may have too."""
        if _is_needed(held):
            self.offered.append(OfferedRegion(held, of_first))

    def hold(self, held: Sequence[LocalRegion]) -> None:
        """Adds parts of tensors that this rank alone contributes."""
        self.held += filter(_is_needed, held)

    def add_tree(self, name: str, value: object) -> None:
        """Adds a tree of tensors and plain values that is the same on every rank."""
        if isinstance(value, torch.Tensor):
            self.add_tensor(name, value)
            return
        tensors: dict[str, torch.Tensor] = {}
        self.values[name] = take_apart(name, value, tensors)
        for each, tensor in tensors.items():
            self.add_tensor(each, tensor)

    def hold_tree(self, name: str, value: object) -> None:
        """Adds a tree that this rank alone contributes."""
        tensors: dict[str, torch.Tensor] = {}
        taken = take_apart(name, value, tensors)
        if not isinstance(value, torch.Tensor):
            self.values[name] = taken
        for each, tensor in tensors.items():
            require_dense(each, tensor)
            self.held.append(whole_of(each, tensor.detach()))

    def add_object(self, name: str, state: object, *, is_everywhere: bool = True) -> None:
        """Adds a tree that may differ between ranks."""
        tensors: dict[str, torch.Tensor] = {}
        value = take_apart(name, state, tensors)
        for each, tensor in tensors.items():
            require_dense(each, tensor)
        self.objects[name] = CapturedObject(state, value, tensors, is_everywhere)


def _is_needed(held: LocalRegion) -> bool:
    """Whether a part has elements; a tensor without any needs a part that says so."""
    return held.nbytes > 0 or prod(held.shape) == 0


def whole_of(name: str, tensor: torch.Tensor) -> LocalRegion:
    """Returns all of a tensor as what this rank holds."""
    shape = tuple(tensor.shape)
    return LocalRegion(name, name_of(tensor.dtype), shape, whole(shape), tensor.nbytes, lambda: flat(tensor))


def cut(held: LocalRegion, start: int, stop: int) -> list[LocalRegion]:
    """Returns the bytes `start` to `stop` of a part, which begin and end between elements."""
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
    """Returns the elements in row-major order; copies them only if they are not so in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Requires that a tensor is one that a checkpoint can hold.

    Raises:
        TypeError: it is sparse, quantized, spread over other processes by another library, or of an unknown type.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{name!r} is a {kind} tensor; a checkpoint holds dense ones. Save tensor.to_dense() instead")
    if hasattr(tensor, "_local_tensor") or hasattr(tensor, "local_shards"):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, which torch.distributed has spread over processes; save it with "
            "torch.distributed.checkpoint, which paceline.load can read"
        )
    name_of(tensor.dtype)
