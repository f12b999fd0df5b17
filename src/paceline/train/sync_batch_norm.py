"""SyncBatchNorm: batch normalization over the batches of all ranks.

The statistics of a set of values are one tensor, which contains the number of values in each channel, followed by each
channel's mean and each channel's sum of squared deviations. `accumulator` returns its dtype. The tensor stays on the
device of the values, so the host does not have to synchronize with that device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from paceline.comm.group.default import find_world
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.preconditions import require_module


def accumulator(values: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which statistics are computed: float64 on the CPU, and at least float32 on other devices.

    GPUs are many times slower in float64, and their float32 sums are accurate enough.
    """
    return torch.float64 if values.is_cpu else torch.promote_types(values.dtype, torch.float32)


def measure(values: torch.Tensor) -> torch.Tensor:
    """Returns the statistics of each channel (the second dimension)."""
    dtype, channels = accumulator(values), values.shape[1]
    count = torch.full((1,), values.numel() // channels, dtype=dtype, device=values.device)
    if values.numel() == 0:
        return count.new_zeros(1 + 2 * channels)
    if values.is_cpu:
        by_channel = values.detach().transpose(0, 1).reshape(channels, -1).to(dtype)
        variance, mean = torch.var_mean(by_channel, 1, correction=0)
    else:  # a transposed copy would take extra memory on the device
        variance, mean = torch.var_mean(values.detach().to(dtype), _all_but_channels(values), correction=0)
    return torch.cat([count, mean, variance * count])


def combine(parts: torch.Tensor) -> torch.Tensor:
    """Combines the statistics of several sets of values, one per row, into those of their union.

    The method is that of Chan, Golub and LeVeque 1979.

    >>> combine(torch.stack([measure(torch.tensor([[1.0], [2.0]])), measure(torch.tensor([[6.0]]))])).tolist()
    [3.0, 3.0, 14.0]
    """
    counts, means, squares = _unpacked(parts)
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count.clamp(min=1)
    return torch.cat([count, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def _unpacked(statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the number of values, the means, and the sums of squared deviations along the last dimension."""
    channels = statistics.shape[-1] // 2
    count, mean, squares = statistics.split([1, channels, channels], -1)
    return count, mean, squares


def _all_but_channels(values: torch.Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


M = TypeVar("M", bound=nn.Module)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization (1d, 2d or 3d) over the batches of all ranks. The batch sizes may differ.

    In training, forward and backward each run one small collective. In evaluation, or without a process group, the
    layer behaves like an ordinary BatchNorm. The gradients of weight and bias are computed from this rank's batch;
    `DistributedDataParallel` averages them.

    Args:
        num_features: the number of channels, the second dimension of the input.
        eps: the value added to the variance for numerical stability.
        momentum: the weight of the latest batch in the running statistics. If None, these statistics are cumulative
            averages.
        affine: whether the layer has a learnable weight and bias.
        track_running_stats: whether the layer keeps running statistics for evaluation.
        process_group: the process group of the ranks; if None, the default group.
        device, dtype: the device and dtype of parameters and buffers.

    Raises:
        ValueError: the input has fewer than two dimensions, or all ranks together have only one value for each channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @eager
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes the input, of shape (N, C) or (N, C, ...)."""
        group = self._group()
        if not self.training or group is None or group.size() == 1:
            plain: torch.Tensor = super().forward(input)
            return plain
        self._check_input_dim(input)
        momentum = self._count_batch()
        normalize: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Normalize.apply
        output, statistics = normalize(input, self.weight, self.bias, self.eps, group)
        if momentum is not None:
            self._track(statistics, momentum)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm got an input of shape {list(input.shape)}; it must have at least two dimensions, the "
                f"second of size num_features = {self.num_features}"
            )

    def _group(self) -> ProcessGroup | None:
        if self.process_group is not None:
            return self.process_group
        world = find_world()
        return None if world is None else world.group

    def _count_batch(self) -> float | torch.Tensor | None:
        """Increments the batch count and returns the batch's weight in the running statistics, if there are any."""
        if self.num_batches_tracked is None:
            return None
        self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        count = self.num_batches_tracked
        return 1.0 / float(count) if count.is_cpu else count.double().reciprocal()

    @torch.no_grad()
    def _track(self, statistics: torch.Tensor, momentum: float | torch.Tensor) -> None:
        count, mean, squares = _unpacked(statistics)
        for running, batch in ((self.running_mean, mean), (self.running_var, squares / (count - 1))):
            assert running is not None
            newest = batch.to(running.dtype)
            if isinstance(momentum, torch.Tensor):
                running.lerp_(newest, momentum.to(running.dtype))
            else:
                running.mul_(1 - momentum).add_(newest, alpha=momentum)

    def __getstate__(self) -> dict[str, object]:
        all_state: Callable[[], dict[str, object]] = super().__getstate__
        state = all_state()
        del state["process_group"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        restore: Callable[[dict[str, object]], None] = super().__setstate__
        restore(state)
        self.__dict__.setdefault("process_group", None)

    def __deepcopy__(self, memo: dict[int, object]) -> SyncBatchNorm:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.process_group = self.process_group
        return copied

    @classmethod
    def convert_sync_batchnorm(cls, module: M, process_group: ProcessGroup | None = None) -> M | SyncBatchNorm:
        """Calls the function of the same name, for code that uses torch's class method."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module: M, process_group: ProcessGroup | None = None) -> M | SyncBatchNorm:
    """Replaces every BatchNorm layer in `module` with a `SyncBatchNorm` that has the same parameters and buffers.

    Args:
        module: the module to convert in place, before it is wrapped and before its optimizer is created.
        process_group: the process group of the ranks; if None, the default group.

    Returns:
        The module, or the new layer if `module` is itself a BatchNorm.

    >>> convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))[1]
    SyncBatchNorm(2, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    """
    require_module(module, "convert_sync_batchnorm")
    return cast("M | SyncBatchNorm", _convert(module, process_group, {}))


def _convert(module: nn.Module, group: ProcessGroup | None, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:  # a layer that is used in two places remains one layer
        return done[id(module)]
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
        done[id(module)] = _synchronized(module, group)
        return done[id(module)]
    done[id(module)] = module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _convert(child, group, done)
    return module


def _synchronized(layer: nn.modules.batchnorm._BatchNorm, group: ProcessGroup | None) -> SyncBatchNorm:
    converted = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, False, layer.track_running_stats, process_group=group
    )
    converted.affine = layer.affine
    converted.training = layer.training
    converted._parameters.update(layer._parameters)
    converted._buffers.update(layer._buffers)
    return converted


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = measure(input)
        everyones = own.new_empty(group.size(), len(own))
        group.all_gather(list(everyones.unbind()), own)
        statistics = combine(everyones)
        count, mean, squares = _unpacked(statistics)
        # the comparison with `count` synchronizes with the device
        if input.numel() <= input.shape[1] and count <= 1:
            raise ValueError(
                f"SyncBatchNorm got {int(count)} value for each channel from all {group.size()} ranks, whose "
                "variance is not defined; use larger batches, or call eval() first"
            )
        inverse = (squares / count + eps).rsqrt()
        kind = torch.promote_types(input.dtype, torch.float32)
        shape = [1, -1] + [1] * (input.dim() - 2)
        centered = input.to(kind) - mean.to(kind).view(shape)
        output = centered * (inverse if weight is None else inverse * weight).to(kind).view(shape)
        if bias is not None:
            output = output + bias.to(kind).view(shape)
        ctx.save_for_backward(input, weight, statistics, inverse)
        ctx.group = group
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(statistics)
        return output.to(input.dtype), statistics

    @staticmethod
    @once_differentiable
    @eager
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, statistics, inverse = ctx.saved_tensors
        count, mean, _ = _unpacked(statistics)
        kind = torch.promote_types(input.dtype, torch.float32)
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims, dtype = _all_but_channels(input), accumulator(input)
        gradient = gradient.to(kind)
        normal = (input.to(kind) - mean.to(kind).view(shape)) * inverse.to(kind).view(shape)
        sums = torch.stack([gradient.sum(dims, dtype=dtype), (gradient * normal).sum(dims, dtype=dtype)])
        of_bias, of_weight = sums.clone()
        ctx.group.all_reduce(sums)
        of_input = None
        if ctx.needs_input_grad[0]:
            means = (sums / count).to(kind)
            slope = (inverse if weight is None else inverse * weight).to(kind)
            of_input = (gradient - means[0].view(shape) - normal * means[1].view(shape)) * slope.view(shape)
            of_input = of_input.to(input.dtype)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias if ctx.has_bias else None,
            None,
            None,
        )
