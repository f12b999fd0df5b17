"""Where a rank's part of a divided parameter is in the undivided one, and what an optimizer keeps for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.captured import Held, flat, whole_of
from paceline.checkpoint.element_types import name_of
from paceline.checkpoint.format.regions import Box, Region, simplified, whole
from paceline.checkpoint.layout import RunPart, parts_of_run
from paceline.errors import CheckpointError
from paceline.parallel.one_copy.optimizer import SharedModelOptimizer
from paceline.parallel.pipeline.module import Pipeline
from paceline.parallel.pipeline.whole import place_of
from paceline.parallel.sharded.logical import LogicalShards
from paceline.parallel.tensor.slices import Slice, slice_of
from paceline.parallel.zero.shards import Shard


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


def held_of_shard(name: str, shard: Shard, run: torch.Tensor) -> list[Held]:
    """Returns the elements of a shard as what this rank holds of the parameter, or of a tensor of its shape."""
    shape, dtype = shape_of_shard(shard), name_of(run.dtype)
    if shard.is_whole:
        return [part_of(name, run, shape, region_of_shard(shard))]

    def held(part: RunPart) -> Held:
        nbytes = (part.stop - part.start) * run.element_size()
        return Held(name, dtype, shape, part.region, nbytes, lambda: part.row_major(run.detach()))

    return [held(part) for part in parts_of_shard(shard)]


def region_of_shard(shard: Shard) -> Region:
    """Returns which part of the undivided parameter a shard is that is all of this rank's parameter."""
    return region_of(shard.param) if slice_of(shard.param) is not None else whole(tuple(shard.shape))


def part_of(name: str, tensor: torch.Tensor, shape: tuple[int, ...], region: Region) -> Held:
    """Returns all of a tensor as what this rank has of a larger one."""
    if region == whole(shape):
        return whole_of(name, tensor.detach())
    return Held(name, name_of(tensor.dtype), shape, region, tensor.nbytes, lambda: flat(tensor))


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
    return any(slice_of(each) is not None or place_of(each) is not None for each in parameters_of(value))


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
    if module is not None and not isinstance(module, Pipeline) and any(map(place_of, module.parameters())):
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


def _begin(mine: Slice) -> tuple[int, ...]:
    return tuple(mine.start if dim == mine.dim else 0 for dim in range(len(mine.shape)))
