"""What a rank contributes to a checkpoint, before anything is copied or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from paceline.checkpoint.element_types import name_of
from paceline.checkpoint.format.regions import Region, whole
from paceline.checkpoint.trees import take_apart


@dataclass(frozen=True)
class Held:
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
class Object:
    """The state of something that need not be the same on every rank: whole, and taken apart."""

    state: object
    value: object
    tensors: Mapping[str, torch.Tensor]


@dataclass
class Captured:
    """The state of a training loop on one rank.

    Attributes:
        everywhere: tensors that are the same on every rank.
        held: parts of tensors that this rank alone contributes.
        values: plain values that are the same on every rank, or that this rank alone has.
        objects: what is compared between the ranks, and kept for each of them if it differs.
    """

    is_first: bool = True
    everywhere: dict[str, torch.Tensor] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    objects: dict[str, Object] = field(default_factory=dict)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that is the same on every rank."""
        require_dense(name, tensor)
        self.everywhere[name] = tensor.detach()

    def add_of_first(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that may differ between ranks; that of the first one counts."""
        require_dense(name, tensor)
        if self.is_first:
            self.held.append(whole_of(name, tensor.detach()))

    def add_tree(self, name: str, value: object) -> None:
        """Adds a tree of tensors and plain values that is the same on every rank."""
        if isinstance(value, torch.Tensor):
            self.add_tensor(name, value)
            return
        tensors: dict[str, torch.Tensor] = {}
        self.values[name] = take_apart(name, value, tensors)
        for each, tensor in tensors.items():
            self.add_tensor(each, tensor)

    def add_object(self, name: str, state: object) -> None:
        """Adds a tree that may differ between ranks."""
        tensors: dict[str, torch.Tensor] = {}
        value = take_apart(name, state, tensors)
        for each, tensor in tensors.items():
            require_dense(each, tensor)
        self.objects[name] = Object(state, value, tensors)


def whole_of(name: str, tensor: torch.Tensor) -> Held:
    """Returns all of a tensor as what this rank holds."""
    shape = tuple(tensor.shape)
    return Held(name, name_of(tensor.dtype), shape, whole(shape), tensor.nbytes, lambda: flat(tensor))


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
