"""Which part of a weight a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.comm.group.process_group import ProcessGroup

_SLICE = "_paceline_slice"


@dataclass(frozen=True)
class WeightSlice:
    """The part of a tensor that this rank holds.

    Attributes:
        dim: the dimension along which the tensor is divided among the ranks of `group`.
        start: the first index of this rank's part in that dimension.
        stop: the index after the last.
        shape: that of the undivided tensor.
    """

    group: ProcessGroup
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]


def bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Returns where a part begins and ends if `length` is divided as evenly as possible; the first parts are longer."""
    least, longer = divmod(length, parts)
    start = part * least + min(part, longer)
    return start, start + least + (part < longer)


def own_slice(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> WeightSlice:
    """Returns which part of an undivided tensor this rank is to hold."""
    start, stop = bounds(tensor.size(dim), group.size(), group.rank())
    return WeightSlice(group, dim, start, stop, tuple(tensor.shape))


def divided(parameter: torch.Tensor, dim: int, group: ProcessGroup) -> torch.nn.Parameter:
    """Returns a new parameter with this rank's part of `parameter`, which `slice_of` recognizes."""
    mine = own_slice(parameter, dim, group)
    part = parameter.detach().narrow(dim, mine.start, mine.stop - mine.start).clone()
    made = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(made, _SLICE, mine)
    return made


def slice_of(parameter: torch.Tensor) -> WeightSlice | None:
    """Returns which part of an undivided weight `parameter` is; None if it is a whole one."""
    found: WeightSlice | None = getattr(parameter, _SLICE, None)
    return found
