"""Where a rank's part of a divided parameter is in the undivided one, and what an optimizer keeps for it.

Where the elements that an optimizer's shard holds, in the order of memory, are in the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import LocalRegion, flat, whole_of
from paceline.train.checkpoint.format.regions import Box, Flat, Region, blocks, moved, simplified, whole
from paceline.train.checkpoint.pytree import name_of
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.pipeline.parameter_index import index_in_model
from paceline.train.pipeline.pipeline import Pipeline
from paceline.train.shared_model.shared_model_optimizer import SharedModelOptimizer
from paceline.train.tensor.weight_slice import WeightSlice, slice_of
from paceline.train.zero.shards import Shard


@dataclass(frozen=True)
class RunPart:
    """A part of a run of elements: the elements `start` to `stop` of the run are those of `region`.

    `in_memory` is the shape that they have in memory; `order` says which dimension of that is which of the tensor.
    """

    start: int
    stop: int
    region: Region
    in_memory: tuple[int, ...]
    order: tuple[int, ...]

    def row_major(self, run: torch.Tensor) -> torch.Tensor:
        """Returns the part's elements as the region has them, given the run; copies them if their order differs."""
        return run[self.start : self.stop].view(self.in_memory).permute(self.order).contiguous().view(-1)

    def fill(self, run: torch.Tensor, elements: torch.Tensor) -> None:
        """Puts the region's elements into the run."""
        permuted = run[self.start : self.stop].view(self.in_memory).permute(self.order)
        permuted.copy_(elements.view(permuted.shape))


def parts_of_run(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int, begin: Sequence[int] | None = None
) -> list[RunPart]:
    """Returns where the elements `start` to `stop` in the order of memory are, for a tensor that fills its memory.

    Args:
        begin: where the tensor begins in a larger one of which it is a block; the regions are then those of the larger.

    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 1, 5)]
    [Flat(start=1, stop=5)]
    >>> [part.region for part in parts_of_run([2, 3], [1, 2], 1, 4)]
    [Box(offset=(1, 0), shape=(1, 1)), Box(offset=(0, 1), shape=(2, 1))]
    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 0, 3, begin=[4, 6])]
    [Box(offset=(4, 6), shape=(1, 3))]
    """
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))
    lengths = [shape[dim] for dim in dims]
    expected = [prod(lengths[at + 1 :]) for at in range(len(lengths))]
    if begin is None and all(shape[dim] == 1 or dim == at for at, dim in enumerate(dims)):
        return [RunPart(0, stop - start, Flat(start, stop), (stop - start,), (0,))]
    assert all(length == 1 or strides[dim] == step for dim, length, step in zip(dims, lengths, expected, strict=True))
    order = tuple(dims.index(dim) for dim in range(len(shape)))
    parts = []
    for block in blocks(lengths, start, stop):
        first = sum(at * step for at, step in zip(block.offset, expected, strict=True)) - start
        box = Box(tuple(block.offset[at] for at in order), tuple(block.shape[at] for at in order))
        region = box if begin is None else moved(box, begin)
        parts.append(RunPart(first, first + prod(block.shape), region, block.shape, order))
    return parts


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the undivided parameter."""
    mine = slice_of(parameter)
    return tuple(parameter.shape) if mine is None else mine.shape


def region_of(parameter: torch.Tensor) -> Region:
    """Returns which part of the undivided parameter a parameter is."""
    mine = slice_of(parameter)
    if mine is None:
        return whole(tuple(parameter.shape))
    extent = tuple(mine.stop - mine.start if dim == mine.dim else length for dim, length in enumerate(mine.shape))
    return simplified(Box(_begin(mine), extent), mine.shape)


def shape_of_shard(shard: Shard) -> tuple[int, ...]:
    """Returns the shape of the undivided parameter of which a rank updates a shard."""
    mine = slice_of(shard.param)
    return tuple(shard.shape) if mine is None else mine.shape


def parts_of_shard(shard: Shard) -> list[RunPart]:
    """Returns where the elements of a run are in the undivided parameter."""
    mine = slice_of(shard.param)
    begin = None if mine is None else _begin(mine)
    return parts_of_run(tuple(shard.shape), shard.strides, *shard.elements, begin)


def held_of_shard(name: str, shard: Shard, run: torch.Tensor) -> list[LocalRegion]:
    """Returns the elements of a shard as what this rank holds of the parameter, or of a tensor of its shape."""
    shape, dtype = shape_of_shard(shard), name_of(run.dtype)
    if shard.is_whole:
        return [part_of(name, run, shape, region_of_shard(shard))]

    def held(part: RunPart) -> LocalRegion:
        nbytes = (part.stop - part.start) * run.element_size()
        return LocalRegion(name, dtype, shape, part.region, nbytes, lambda: part.row_major(run.detach()))

    return [held(part) for part in parts_of_shard(shard)]


def region_of_shard(shard: Shard) -> Region:
    """Returns which part of the undivided parameter a shard is that is all of this rank's parameter."""
    return region_of(shard.param) if slice_of(shard.param) is not None else whole(tuple(shard.shape))


def part_of(name: str, tensor: torch.Tensor, shape: tuple[int, ...], region: Region) -> LocalRegion:
    """Returns all of a tensor as what this rank has of a larger one."""
    if region == whole(shape):
        return whole_of(name, tensor.detach())
    return LocalRegion(name, name_of(tensor.dtype), shape, region, tensor.nbytes, lambda: flat(tensor))


def part_of_saved(whole_tensor: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Returns what this rank has of a parameter, given all of it.

    Raises:
        CheckpointError: it has another shape.
    """
    mine = slice_of(parameter)
    if mine is None:
        return whole_tensor
    if tuple(whole_tensor.shape) != mine.shape:
        raise CheckpointError(
            f"{name!r} has the shape {list(whole_tensor.shape)} in what was saved, and {list(mine.shape)} here, on all "
            "ranks together; load it into the same model"
        )
    return whole_tensor.narrow(mine.dim, mine.start, mine.stop - mine.start)


def is_part(tensor: torch.Tensor, parameter: torch.Tensor, name: str) -> bool:
    """Returns whether what an optimizer keeps for a parameter is divided as that is.

    Raises:
        TypeError: it is neither so divided nor the same on all ranks that have parts of the parameter.
    """
    if slice_of(parameter) is None:
        return False
    if tensor.shape == parameter.shape:
        return True
    if tensor.numel() == 1:
        return False
    raise TypeError(
        f"{name!r} has the shape {list(tensor.shape)}, and this rank's part of the parameter has "
        f"{list(parameter.shape)}; of a parameter that parallelize_module divided, a checkpoint can hold what an "
        "optimizer keeps for each element, as Adam does"
    )


def is_divided(value: nn.Module | Optimizer) -> bool:
    """Returns whether a model or an optimizer is that of a part of a model."""
    if isinstance(value, Pipeline):
        return True
    return any(slice_of(each) is not None or index_in_model(each) is not None for each in parameters_of(value))


def parameters_of(value: nn.Module | Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of a model, or of an optimizer in the order of its groups."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [each for group in value.param_groups for each in group["params"]]


def is_first_of(parameters: Iterable[torch.Tensor]) -> bool:
    """Returns whether this is the first of the ranks that `parallelize_module` divided these parameters among.

    What is not divided among them is the same on all, and this one's counts where each has it in other shards.
    """
    return all(mine.group.rank() == 0 for each in parameters if (mine := slice_of(each)) is not None)


def require_fit(name: str, module: nn.Module | None, value: object) -> None:
    """Requires that a checkpoint can put a model, or the model of an optimizer, together from the ranks' parts.

    Raises:
        TypeError: it cannot, with the reason.
    """
    if isinstance(value, SharedModelOptimizer) and is_divided(value):
        raise TypeError(
            f"{name!r} is a SharedModelOptimizer of a model that parallelize_module or Pipeline divided; it keeps one "
            "copy of a whole model on each host. Use a ZeroRedundancyOptimizer over the data-parallel ranks"
        )
    if isinstance(value, LogicalShards) and module is not None and is_divided(module):
        raise TypeError(
            f"{name!r} is a LogicalShards of a model that parallelize_module or Pipeline divided; each of its ranks "
            "computes the whole model. Use DistributedDataParallel over the data-parallel ranks"
        )
    if module is not None and not isinstance(module, Pipeline) and any(map(index_in_model, module.parameters())):
        raise TypeError(
            f"{name!r} has layers of a Pipeline, of which only some are trained on this rank; put the Pipeline itself "
            "into the state"
        )


def require_undivided(name: str, module: nn.Module | None, value: object) -> None:
    """Requires that the model of an elastic job, or its optimizer, is whole.

    Raises:
        TypeError: it is divided.
    """
    holder = module if module is not None else value
    if isinstance(holder, (nn.Module, Optimizer)) and is_divided(holder):
        raise TypeError(
            f"{name!r} belongs to a model that is divided by Pipeline or parallelize_module, in an ElasticState. An "
            "elastic job goes on with whichever workers are left, so each must have the whole model; save the model "
            "and the optimizer of a divided one without ElasticState, and start again from the checkpoint with "
            "--max-restarts"
        )


def _begin(mine: WeightSlice) -> tuple[int, ...]:
    return tuple(mine.start if dim == mine.dim else 0 for dim in range(len(mine.shape)))
