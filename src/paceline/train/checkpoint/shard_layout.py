"""ShardLayout: the region of an undivided parameter that a rank holds.

`parallelize_module` narrows a parameter in one dimension, and ZeRO cuts the result into runs of elements in memory
order. A `ShardLayout` describes the combination of both. It is computed once for each parameter (`ParameterLayouts`) or
optimizer shard, and passed on. It is not stored on the parameter, because the parameter may be moved or divided
differently later.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.linux import read_only_memory
from paceline.train.checkpoint.format.regions import (
    Flat,
    Region,
    TensorBlock,
    blocks,
    count,
    cut_out,
    moved,
    simplified,
    whole,
)
from paceline.train.checkpoint.format.safetensors_header import ITEMSIZE
from paceline.train.checkpoint.pytree import name_of
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.pipeline.pipeline import Pipeline, index_in_model
from paceline.train.shared_model.shared_model_optimizer import SharedModelOptimizer
from paceline.train.tensor.layers import WeightSlice, slice_of
from paceline.train.zero.shards import Shard


@dataclass(frozen=True)
class LocalRegion:
    """A region of a tensor in this rank's memory.

    Attributes:
        dtype: the safetensors name of the tensor's dtype.
        shape: the shape of the whole tensor.
        elements: a function that returns the elements, contiguous and in row-major order. No copy is made before it is
            called.
        of_first: whether the elements may differ between ranks that have the region. If so, the first rank's are saved.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    elements: Callable[[], torch.Tensor]
    of_first: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the region in bytes."""
        return count(self.region) * ITEMSIZE[self.dtype]


def whole_of(name: str, tensor: torch.Tensor) -> LocalRegion:
    """Returns the region that covers a whole tensor."""
    shape = tuple(tensor.shape)
    return LocalRegion(name, name_of(tensor.dtype), shape, whole(shape), partial(flat, tensor))


def cut(held: LocalRegion, start: int, stop: int) -> list[LocalRegion]:
    """Returns the regions that make up bytes `start` to `stop` (multiples of the element size) of a region."""
    if (start, stop) == (0, held.nbytes):
        return [held]
    parts: list[LocalRegion] = []
    size = ITEMSIZE[held.dtype]
    first = start // size
    for region in cut_out(held.region, first, stop // size):
        last = first + count(region)
        parts.append(replace(held, region=region, elements=partial(_section, held, first, last)))
        first = last
    return parts


def _section(held: LocalRegion, first: int, last: int) -> torch.Tensor:
    return held.elements()[first:last]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in row-major order, and copies them only if their order in memory differs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError if a checkpoint cannot hold a tensor, for example because it is sparse."""
    if tensor.is_meta:
        raise TypeError(f"{name!r} is on the meta device and has no values; initialize it, or leave it out")
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


class LoadTargets:
    """Checks that a checkpoint can be loaded into tensors."""

    def __init__(self) -> None:
        self._read_only: list[tuple[int, int]] | None = None  # address ranges, read for the first tensor on the CPU

    def require(self, name: str, tensor: torch.Tensor) -> None:
        """Raises CheckpointError if values cannot be copied into a tensor."""
        fault = self._fault_of(tensor)
        if fault is not None:
            raise CheckpointError(f"{name!r} cannot be loaded: here, it is {fault}")

    def _fault_of(self, tensor: torch.Tensor) -> str | None:
        if tensor.is_meta:
            return (
                "on the meta device and has no memory; allocate it first, for example with "
                "module.to_empty(device='cpu')"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            return f"a {kind} tensor; load into a dense tensor, and convert that"
        if hasattr(tensor, "_local_tensor") or hasattr(tensor, "local_shards"):
            return f"a {type(tensor).__name__}, which torch.distributed has distributed over processes"
        if _has_shared_elements(tensor):
            return (
                f"a view of shape {list(tensor.shape)} and strides {list(tensor.stride())}, of which several elements "
                "share memory, for example the result of expand; pass tensor.clone()"
            )
        if tensor.is_cpu and self._is_read_only(tensor):
            return (
                "in memory that this process cannot write to, for example a numpy.memmap with mode 'r'; pass "
                "tensor.clone()"
            )
        return None

    def _is_read_only(self, tensor: torch.Tensor) -> bool:
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # a subclass without memory of its own
            return False
        if tensor.numel() == 0 or start == 0:
            return False
        if self._read_only is None:
            self._read_only = read_only_memory()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (last + 1) * tensor.element_size()
        index = bisect.bisect_right(self._read_only, (start, sys.maxsize))
        ranges = self._read_only[max(0, index - 1) : index + 1]
        return any(first < stop and start < end for first, end in ranges)


def _has_shared_elements(tensor: torch.Tensor) -> bool:
    """Returns True if several elements of a strided tensor have the same address."""
    axes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    extent, is_certain = 0, True
    for stride, size in axes:
        if size == 0:
            return False
        is_certain = is_certain and stride > extent
        extent += (size - 1) * stride
    if is_certain or not axes:
        return False
    if axes[0][0] == 0:
        return True
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in axes:  # a rare case: the result depends on the numbers
        offsets = offsets.unsqueeze(-1) + stride * torch.arange(size, device="cpu")
    return len(offsets.unique()) < offsets.numel()


@dataclass(frozen=True)
class RunPart:
    """The elements `start` to `stop` of a run, which form one region of the undivided parameter.

    Attributes:
        in_memory: the shape of the elements in memory order.
        order: for each dimension of the parameter, the corresponding dimension of `in_memory`.
    """

    start: int
    stop: int
    region: Region
    in_memory: tuple[int, ...]
    order: tuple[int, ...]

    def row_major(self, run: torch.Tensor) -> torch.Tensor:
        """Returns the part's elements in row-major order, and copies them only if their order in memory differs."""
        return self._permuted(run).contiguous().view(-1)

    def fill(self, run: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies the region's row-major elements into the run."""
        permuted = self._permuted(run)
        permuted.copy_(elements.view(permuted.shape))

    def _permuted(self, run: torch.Tensor) -> torch.Tensor:
        return run[self.start : self.stop].view(self.in_memory).permute(self.order)


def parts_of_run(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int, begin: Sequence[int] | None = None
) -> list[RunPart]:
    """Returns the regions formed by elements `start` to `stop` (in memory order) of a tensor without gaps.

    The strides are in elements. If `begin` is the offset of the tensor within a larger tensor, regions of the larger
    tensor are returned.

    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 1, 5)]
    [Flat(start=1, stop=5)]
    >>> [part.region for part in parts_of_run([2, 3], [1, 2], 1, 4)]
    [TensorBlock(offset=(1, 0), shape=(1, 1)), TensorBlock(offset=(0, 1), shape=(2, 1))]
    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 0, 3, begin=[4, 6])]
    [TensorBlock(offset=(4, 6), shape=(1, 3))]
    """
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))
    lengths = [shape[dim] for dim in dims]
    expected = [prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    if begin is None and all(shape[dim] == 1 or dim == axis for axis, dim in enumerate(dims)):
        return [RunPart(0, stop - start, Flat(start, stop), (stop - start,), (0,))]
    assert all(length == 1 or strides[dim] == step for dim, length, step in zip(dims, lengths, expected, strict=True))
    order = tuple(dims.index(dim) for dim in range(len(shape)))
    parts = []
    for block in blocks(lengths, start, stop):
        first = sum(index * step for index, step in zip(block.offset, expected, strict=True)) - start
        permuted = TensorBlock(tuple(block.offset[axis] for axis in order), tuple(block.shape[axis] for axis in order))
        region = permuted if begin is None else moved(permuted, begin)
        parts.append(RunPart(first, first + prod(block.shape), region, block.shape, order))
    return parts


@dataclass(frozen=True)
class ShardLayout:
    """The region of an undivided parameter that this rank holds.

    Attributes:
        shape: the shape of the undivided parameter.
        local_shape: the shape of the tensor that this rank holds, one-dimensional for a run of elements.
        region: the region, if this rank's elements form one region in row-major order, or None if they are scattered.
        parts: the regions that scattered elements form, in memory order, or () if `region` is set.
        weight_slice: the slice that `parallelize_module` assigned to this rank, or None if the parameter is undivided.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    region: Region | None
    parts: tuple[RunPart, ...]
    weight_slice: WeightSlice | None

    @staticmethod
    def of(parameter: torch.Tensor) -> ShardLayout:
        """Returns the layout of a parameter in this rank's module."""
        local_shape, weight_slice = tuple(parameter.shape), slice_of(parameter)
        if weight_slice is None:
            return ShardLayout(local_shape, local_shape, whole(local_shape), (), None)
        return ShardLayout(weight_slice.shape, local_shape, _region_of(weight_slice), (), weight_slice)

    @staticmethod
    def of_shard(shard: Shard) -> ShardLayout:
        """Returns the layout of a shard, even if its parameter is currently freed."""
        weight_slice = slice_of(shard.param)
        shape = tuple(shard.shape) if weight_slice is None else weight_slice.shape
        local_shape = tuple(shard.run_shape)
        if shard.is_whole:
            region = whole(shape) if weight_slice is None else _region_of(weight_slice)
            return ShardLayout(shape, local_shape, region, (), weight_slice)
        begin = None if weight_slice is None else _offset_of(weight_slice)
        parts = parts_of_run(tuple(shard.shape), shard.strides, *shard.elements, begin)
        if len(parts) == 1 and len(parts[0].in_memory) == 1:
            return ShardLayout(shape, local_shape, parts[0].region, (), weight_slice)
        return ShardLayout(shape, local_shape, None, tuple(parts), weight_slice)

    @property
    def is_divided(self) -> bool:
        """Whether `parallelize_module` divided the parameter."""
        return self.weight_slice is not None

    @property
    def is_on_first_rank(self) -> bool:
        """Whether this is the first of the ranks among which `parallelize_module` divided the parameter."""
        return self.weight_slice is None or self.weight_slice.group.rank() == 0

    def local_regions(self, name: str, elements: torch.Tensor) -> list[LocalRegion]:
        """Returns the regions of the undivided tensor `name` whose elements this rank holds.

        The tensor is the parameter, or an optimizer tensor with one value for each element. `elements` has shape
        `local_shape`.
        """
        dtype, elements = name_of(elements.dtype), elements.detach()
        if self.region is not None:
            return [LocalRegion(name, dtype, self.shape, self.region, partial(flat, elements))]
        return [
            LocalRegion(name, dtype, self.shape, part.region, partial(part.row_major, elements)) for part in self.parts
        ]

    def part_of_saved(self, undivided: torch.Tensor, name: str) -> torch.Tensor:
        """Returns this rank's slice of an undivided tensor."""
        cut = self.weight_slice
        if cut is None:
            return undivided
        if tuple(undivided.shape) != self.shape:
            raise CheckpointError(
                f"{name!r} has the shape {list(undivided.shape)} in the saved state, but {list(self.shape)} here, on "
                "all ranks together; load it into the same model"
            )
        return undivided.narrow(cut.dim, cut.start, cut.stop - cut.start)

    def applies_to(self, tensor: torch.Tensor, name: str) -> bool:
        """Returns True if a tensor in the parameter's optimizer state is divided in the same way as the parameter.

        Raises TypeError if the parameter is divided, and the tensor has neither its local shape nor a single element.
        """
        if not self.is_divided or tensor.shape == self.local_shape:
            return self.is_divided
        if tensor.numel() == 1:
            return False
        raise TypeError(
            f"{name!r} has the shape {list(tensor.shape)}, but this rank's part of the parameter has "
            f"{list(self.local_shape)}; for a parameter that parallelize_module divided, a checkpoint can only contain "
            "optimizer state with a value for each element, such as Adam's"
        )


class ParameterLayouts(dict[torch.Tensor, ShardLayout]):
    """The layouts of the parameters in a state. Each is computed only once, and shared by modules and optimizers."""

    def __missing__(self, parameter: torch.Tensor) -> ShardLayout:
        layout = self[parameter] = ShardLayout.of(parameter)
        return layout


def _region_of(weight_slice: WeightSlice) -> Region:
    shape, dim = weight_slice.shape, weight_slice.dim
    extent = (*shape[:dim], weight_slice.stop - weight_slice.start, *shape[dim + 1 :])
    return simplified(TensorBlock(_offset_of(weight_slice), extent), shape)


def _offset_of(weight_slice: WeightSlice) -> tuple[int, ...]:
    return tuple(weight_slice.start if dim == weight_slice.dim else 0 for dim in range(len(weight_slice.shape)))


def is_divided(value: nn.Module | Optimizer) -> bool:
    """Returns True if `Pipeline` or `parallelize_module` divides the given model (or the given optimizer's model)."""
    if isinstance(value, Pipeline):
        return True
    return any(
        slice_of(parameter) is not None or index_in_model(parameter) is not None for parameter in parameters_of(value)
    )


def parameters_of(value: nn.Module | Optimizer) -> list[torch.Tensor]:
    """Returns a model's parameters, or an optimizer's parameters in the order of its groups."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [parameter for group in value.param_groups for parameter in group["params"]]


def require_fit(name: str, module: nn.Module | None, value: object) -> None:
    """Raises TypeError if a model, or the model of an optimizer, cannot be assembled from the ranks' parts."""
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
    """Raises TypeError if a model or an optimizer in an elastic job is divided among ranks."""
    holder = module if module is not None else value
    if isinstance(holder, (nn.Module, Optimizer)) and is_divided(holder):
        raise TypeError(
            f"{name!r} belongs to a model that is divided by Pipeline or parallelize_module, in an ElasticState. An "
            "elastic job continues with the remaining workers, so each must have the whole model; save the model and "
            "the optimizer of a divided one without ElasticState, and start again from the checkpoint with "
            "--max-restarts"
        )
