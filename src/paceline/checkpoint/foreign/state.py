"""What a foreign file holds: a tree of plain values that refers to tensors, which are read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.checkpoint.trees import put_together


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Foreign(Protocol):
    """A state that another library saved."""

    @property
    def path(self) -> str:
        """Where it is."""

    @property
    def kind(self) -> str:
        """What it is, for people."""

    @property
    def tree(self) -> object:
        """Nested dicts, lists and tuples of plain values, in which `TensorRef` stands for tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is known of each tensor, by its name."""

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU; it may be mapped from the file, so it is not to be written to."""


def infos_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Returns what is known of tensors."""
    return {name: TensorInfo(each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def state_of(foreign: Foreign) -> object:
    """Returns all that was saved, with its tensors: what torch.load would have returned."""
    return put_together(foreign.tree, foreign.read)
