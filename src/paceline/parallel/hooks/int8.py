"""Averages buckets as 8-bit integers, and carries rounding errors over into the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.futures import AnyFuture, DeferredFuture, future_of
from paceline.parallel.ddp.hook import GradBucket, Reduced
from paceline.parallel.hooks.average import allreduce_hook, group_of

_LEVELS = 127


@dataclass
class Int8State:
    """The state of `int8_hook`.

    Args:
        process_group: the ranks; None for the default group.
        block_size: the number of elements that share one float32 scale.
        use_error_feedback: add to each gradient the rounding error of the previous step.
    """

    process_group: ProcessGroup | None = None
    block_size: int = 256
    use_error_feedback: bool = True
    lost: dict[int, torch.Tensor] = field(default_factory=dict)  # by bucket, for this rank's gradients
    lost_of_average: dict[int, torch.Tensor] = field(default_factory=dict)  # for this rank's part of the average

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")


def int8_hook(state: Int8State, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket with about a quarter of float32's bytes.

    Each rank sends rank r its part r of the gradients, rounded to 8 bits block by block; rank r averages what it
    received, rounds again, and sends the result to all. The next step compensates for both roundings (error feedback;
    Seide et al. 2014, on both sides as in Tang et al. 2021, 1-bit Adam). A block with an infinity or a NaN arrives as
    NaN.
    """
    group = group_of(state.process_group)
    size, index = group.size(), bucket.index()
    gradient = bucket.buffer()
    if not gradient.is_floating_point():
        return allreduce_hook(group, bucket)
    count = gradient.numel()
    part = -(-count // (size * state.block_size)) * state.block_size
    padded = gradient.new_zeros(size * part, dtype=torch.float32)
    padded[:count] = gradient
    quantised, scales = _quantise(padded, state.lost, state, index)

    parts = [torch.empty(part, dtype=torch.int8, device=gradient.device) for _ in range(size)]
    their_scales = [torch.empty(part // state.block_size, device=gradient.device) for _ in range(size)]
    work = group.all_to_all(
        [_bytes(q, s) for q, s in zip(parts, their_scales, strict=True)],
        [_bytes(q, s) for q, s in zip(quantised.view(size, -1), scales.view(size, -1), strict=True)],
        async_op=True,
    )

    def average_part(done: DeferredFuture[list[torch.Tensor]]) -> Reduced:
        done.value()
        total = sum(_restore(q, s) for q, s in zip(parts, their_scales, strict=True))
        assert isinstance(total, torch.Tensor)
        mine, my_scales = _quantise(total / size, state.lost_of_average, state, index)
        group.all_gather([_bytes(q, s) for q, s in zip(parts, their_scales, strict=True)], _bytes(mine, my_scales))
        whole = torch.cat([_restore(q, s) for q, s in zip(parts, their_scales, strict=True)])
        return whole[:count].to(gradient.dtype)

    return future_of(work).then(average_part)


def _quantise(
    values: torch.Tensor, lost: dict[int, torch.Tensor], state: Int8State, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 8-bit integers and a scale for each block of them; keeps the rounding errors in `lost`."""
    if state.use_error_feedback and index in lost and lost[index].shape == values.shape:
        values = values + lost[index]
    blocks = values.view(-1, state.block_size)
    scales = blocks.abs().amax(1) / _LEVELS
    levels = blocks / torch.where(scales > 0, scales, 1).unsqueeze(1)
    quantised = levels.round().nan_to_num(_LEVELS, _LEVELS, -_LEVELS).to(torch.int8).view(-1)
    # An infinite scale would come back as a finite zero where the integer is zero.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    if state.use_error_feedback:
        lost[index] = (values - _restore(quantised, scales)).nan_to_num_(0, 0, 0)
    return quantised, scales


def _restore(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (quantised.view(len(scales), -1) * scales.unsqueeze(1)).view(-1)


def _bytes(quantised: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """Returns integers and scales as tensors of one dtype, which travel in one call."""
    return [quantised.view(torch.uint8), scales.view(torch.uint8)]
