"""WeightSlice: the part of a weight that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.comm.group.process_group import ProcessGroup

_SLICE = "_paceline_slice"


@dataclass(frozen=True)
class WeightSlice:
    """The part of a tensor that this rank holds.

    Attributes:
        group: the ranks among which the tensor is divided.
        dim: the dimension along which the tensor is divided.
        start: the first index of this rank's part along `dim`.
        stop: the index after the end of this rank's part along `dim`.
        shape: the shape of the undivided tensor.
    """

    group: ProcessGroup
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]


def bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Returns the start and end of a part if `length` is divided as evenly as possible; longer parts are first."""
    least, longer = divmod(length, parts)
    start = part * least + min(part, longer)
    return start, start + least + (part < longer)


def divided(parameter: torch.Tensor, dim: int, group: ProcessGroup) -> torch.nn.Parameter:
    """Creates a parameter that contains this rank's part of `parameter`; `slice_of` returns its WeightSlice."""
    start, stop = bounds(parameter.size(dim), group.size(), group.rank())
    part = parameter.detach().narrow(dim, start, stop - start).clone()
    own = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(own, _SLICE, WeightSlice(group, dim, start, stop, tuple(parameter.shape)))
    return own


def slice_of(parameter: torch.Tensor) -> WeightSlice | None:
    """Returns the WeightSlice of a divided parameter, or None if the parameter is whole."""
    found: WeightSlice | None = getattr(parameter, _SLICE, None)
    return found
