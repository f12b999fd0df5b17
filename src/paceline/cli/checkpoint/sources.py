"""Any checkpoint, Paceline's or another library's, as the commands see it: tensors by name, and plain values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.format.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoint.format.values import Json, encode
from paceline.cli.checkpoint.leaves import leaves
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from paceline.checkpoint.foreign.state import Foreign


@dataclass(frozen=True)
class Source:
    """What a checkpoint holds.

    Attributes: `title`, what it is and where; `tensors`, type and shape by name; `values`, by path; `read`, which
    returns a tensor; `checkpoint`, if it is Paceline's; and `closing`, which closes it.
    """

    title: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    values: dict[str, Json]
    read: Callable[[str], torch.Tensor]
    checkpoint: Checkpoint | None
    closing: AbstractContextManager[object]


def source_of(path: str) -> Source:
    """Opens what is at a path.

    Raises:
        CheckpointError: there is nothing that can be read.
    """
    foreign = foreign_at(path)
    if foreign is None:
        checkpoint = open_checkpoint(path)
        manifest = checkpoint.manifest
        return Source(
            title=checkpoint.describe(),
            tensors={name: (each.dtype, each.shape) for name, each in manifest.tensors.items()},
            values=dict(leaves(manifest.values)),
            read=lambda name: _tensor(checkpoint, name),
            checkpoint=checkpoint,
            closing=checkpoint,
        )
    return Source(
        title=f"{foreign.path} ({foreign.kind})",
        tensors={name: (str(each.dtype).removeprefix("torch."), each.shape) for name, each in foreign.tensors.items()},
        values=dict(leaves(_shown(foreign.tree))),
        read=foreign.read,
        checkpoint=None,
        closing=nullcontext(),
    )


def foreign_at(path: str) -> Foreign | None:
    """Returns what another library saved at a path; None if there is no such thing."""
    if not Path(path).is_file() and not Path(path, ".metadata").is_file():
        return None
    from paceline.checkpoint.foreign.opening import open_foreign

    try:
        return open_foreign(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    import torch

    from paceline.checkpoint.element_types import type_of

    entry = checkpoint.entry(name)
    data = checkpoint.read(name)
    if not data:
        return torch.empty(entry.shape, dtype=type_of(entry.dtype))
    return torch.frombuffer(data, dtype=type_of(entry.dtype)).reshape(entry.shape)


def _shown(value: object) -> Json:
    """Returns a value as JSON; what JSON cannot hold is shown as text."""
    if isinstance(value, dict):
        return {str(key): _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    try:
        return encode(value)
    except TypeError:
        return str(value)
