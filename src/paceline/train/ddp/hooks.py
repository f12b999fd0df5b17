"""Communication hooks for `DistributedDataParallel.register_comm_hook`.

The hooks send gradients uncompressed, in half precision, as 8-bit integers, or as low-rank factors (PowerSGD, Vogels et
al. 2019). All hooks divide by the number of ranks, and their results are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap

import torch

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.default import default_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.ddp.comm_hook import (
    AnyFuture,
    DeferredFuture,
    GradBucket,
    Hook,
    Reduced,
    collect_all,
    future_of,
    reduced_tensor,
)

FutureHook = Callable[[object, GradBucket], "AnyFuture[Reduced]"]


def average(tensors: torch.Tensor | list[torch.Tensor], group: ProcessGroup) -> DeferredFuture[list[torch.Tensor]]:
    """Starts averaging the tensors in place over the ranks, and returns a future for them."""
    return future_of(group.all_reduce(tensors, ReduceOp.AVG, async_op=True))


def allreduce_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket with an all-reduce of the flat buffer, without compression.

    Args:
        process_group: the process group, which is the hook's state; if None, the default group.
        bucket: the gradients to average.
    """
    return average(bucket.buffer(), group_of(process_group)).then(lambda done: done.value()[0])


def fp16_compress_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket in float16, with half the traffic of float32. The engine accumulates the sum in float32."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(process_group: object, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket in bfloat16, a format with the range of float32 and less precision than float16."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> FutureHook:
    """Returns a hook that calls `hook` with buckets in float16."""
    return compress_wrapper(torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> FutureHook:
    """Returns a hook that calls `hook` with buckets in bfloat16."""
    return compress_wrapper(torch.bfloat16, hook)


def compress_wrapper(dtype: torch.dtype, hook: Hook) -> FutureHook:
    """Returns a hook that converts each bucket to `dtype`, calls `hook`, and converts the result back."""

    def compressed(state: object, bucket: GradBucket) -> AnyFuture[Reduced]:
        original = bucket.buffer()
        if original.is_floating_point():  # complex gradients are not converted
            bucket.set_buffer(original.to(dtype))
        future = hook(state, bucket)
        return DeferredFuture(lambda: original.copy_(reduced_tensor(future)))

    return compressed


def group_of(process_group: object) -> ProcessGroup:
    """Returns the process group passed as a hook's state, or the default group if the state is None."""
    if process_group is None:
        return default_group()
    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"the communication hook's state is a {type(process_group).__name__}; it must be a paceline.ProcessGroup, "
            "or None for the default group"
        )
    return process_group


_LEVELS = 127


@dataclass
class Int8State:
    """The state of `int8_hook`.

    Args:
        process_group: the process group of the ranks; if None, the default group.
        block_size: the number of elements that share one float32 scale.
        use_error_feedback: whether the rounding error of a step is added to the next gradient.
    """

    process_group: ProcessGroup | None = None
    block_size: int = 256
    use_error_feedback: bool = True
    lost: dict[int, torch.Tensor] = field(default_factory=dict)  # rounding errors of this rank's gradients, by bucket
    lost_of_average: dict[int, torch.Tensor] = field(default_factory=dict)  # rounding errors of averages, by bucket

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")


def int8_hook(state: Int8State, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages the bucket as 8-bit integers, with about 25% of float32's traffic.

    Each rank sends part r of its gradients to rank r, rounded to 8 bits block by block. Rank r averages the parts that
    it receives, rounds the average, and sends it to all ranks. The next step compensates for both rounding errors
    (error feedback, Seide et al. 2014; in both directions, as in 1-bit Adam, Tang et al. 2021). A block that contains
    infinity or NaN becomes NaN.
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
    quantized, scales = _quantize(padded, state.lost, state, index)

    # each part consists of integers and scales
    mine = zip(quantized.view(size, -1), scales.view(size, -1), strict=True)
    parts = [
        (
            torch.empty(part, dtype=torch.int8, device=gradient.device),
            torch.empty(part // state.block_size, device=gradient.device),
        )
        for _ in range(size)
    ]
    received = list(starmap(_bytes, parts))
    work = group.all_to_all(received, list(starmap(_bytes, mine)), async_op=True)

    def average_part(done: DeferredFuture[list[torch.Tensor]]) -> Reduced:
        done.value()
        total = sum(starmap(_restore, parts))
        assert isinstance(total, torch.Tensor)
        group.all_gather(received, _bytes(*_quantize(total / size, state.lost_of_average, state, index)))
        return torch.cat(list(starmap(_restore, parts)))[:count].to(gradient.dtype)

    return future_of(work).then(average_part)


def _quantize(
    values: torch.Tensor, lost: dict[int, torch.Tensor], state: Int8State, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds values to 8-bit integers with one scale per block; stores the rounding errors in `lost`."""
    if state.use_error_feedback and index in lost and lost[index].shape == values.shape:
        values = values + lost[index]
    blocks = values.view(-1, state.block_size)
    scales = blocks.abs().amax(1) / _LEVELS
    levels = blocks / torch.where(scales > 0, scales, 1).unsqueeze(1)
    quantized = levels.round().nan_to_num(_LEVELS, _LEVELS, -_LEVELS).to(torch.int8).view(-1)
    # With an infinite scale, some elements of the block would be infinite and others NaN.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    if state.use_error_feedback:
        lost[index] = (values - _restore(quantized, scales)).nan_to_num_(0, 0, 0)
    return quantized, scales


def _restore(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (quantized.view(len(scales), -1) * scales.unsqueeze(1)).view(-1)


def _bytes(quantized: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """Returns integers and scales as uint8 views, so that one call can send both."""
    return [quantized.view(torch.uint8), scales.view(torch.uint8)]


@dataclass
class PowerSGDState:
    """The state of `power_sgd_hook`, with the same arguments as torch's class.

    Args:
        process_group: the process group of the ranks; if None, the default group.
        matrix_approximation_rank: the rank r of the factors; a higher rank is more accurate and more expensive.
        start_powerSGD_iter: the number of initial steps in which gradients are averaged uncompressed, because they
            change quickly at the start of training.
        min_compression_rate: the rate n m / ((n + m) r) that an n x m matrix must exceed to be compressed.
        use_error_feedback: whether the approximation error of a step is added to the next gradient.
        warm_start: whether the power iteration starts from the result of the previous step.
        orthogonalization_epsilon: the number that is added to a column's norm before dividing by it.
        random_seed: the seed for the first iteration, which must be the same on every rank.
        compression_stats_logging_frequency, batch_tensors_with_same_shape: have no effect; accepted for compatibility
            with torch.
    """

    process_group: ProcessGroup | None = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    iter: int = 0
    errors: dict[int, torch.Tensor] = field(default_factory=dict)  # approximation errors, by bucket
    rights: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # the factor Q of each matrix, by bucket
    # the initial value of `rights`
    _drawn: dict[int, list[torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank is {self.matrix_approximation_rank}; it must be at least 1")
        if self.start_powerSGD_iter < 0:
            raise ValueError(
                f"start_powerSGD_iter is {self.start_powerSGD_iter}; it is a number of steps and must not be negative"
            )

    def is_worth_it(self, gradient: torch.Tensor) -> bool:
        """Returns True if a gradient, viewed as a matrix with its first dimension as rows, should be compressed."""
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        factors = (rows + columns) * self.matrix_approximation_rank
        return factors * self.min_compression_rate < rows * columns

    def first_right(self, index: int, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the initial factor Q of the power iteration for each matrix."""
        shapes = [(matrix.shape[1], min(self.matrix_approximation_rank, *matrix.shape)) for matrix in matrices]
        known, drawn = self.rights.get(index), self._drawn.get(index)
        if not self.warm_start or drawn is None or [q.shape for q in drawn] != shapes:
            generator = torch.Generator("cpu").manual_seed(self.random_seed + self.iter * 1009 + index)
            # The CPU generator draws the same numbers regardless of the device of the matrices.
            drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
            drawn = [q.to(matrix.device) for q, matrix in zip(drawn, matrices, strict=True)]
            self._drawn[index] = drawn
        if not self.warm_start or known is None or [q.shape for q in known] != shapes:
            return drawn
        # Factors from non-finite gradients are non-finite. `where` avoids a branch, which would wait for the device.
        return [torch.where(q.isfinite().all(), q, first.to(q)) for q, first in zip(known, drawn, strict=True)]


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages matrices as products P Qᵀ, where P and Q have r columns, and averages vectors uncompressed.

    Each step performs one power iteration on a gradient matrix M: P = M Q is averaged and orthonormalized; then
    Q = Mᵀ P is averaged. The difference between this rank's gradient and P Qᵀ is added to its next gradient.
    """
    group = group_of(state.process_group)
    index = bucket.index()
    step = state.iter
    if bucket.is_last():
        state.iter += 1
    if step < state.start_powerSGD_iter or not bucket.buffer().is_floating_point():
        return allreduce_hook(group, bucket)
    gradient = bucket.buffer()
    error = state.errors.get(index)
    if state.use_error_feedback and error is not None and error.shape == gradient.shape:
        gradient.add_(error)
    views = bucket.gradients()
    compressed = [number for number, view in enumerate(views) if state.is_worth_it(view)]
    plain = [view for number, view in enumerate(views) if number not in compressed]
    wide = torch.promote_types(gradient.dtype, torch.float32)  # products are computed in at least float32
    matrices = [views[number].reshape(len(views[number]), -1).to(wide, copy=True) for number in compressed]
    rights = [q.to(m.dtype) for q, m in zip(state.first_right(index, matrices), matrices, strict=True)]
    rights = [_orthonormal(q, state.orthogonalization_epsilon) for q in rights]
    lefts = [m @ q for m, q in zip(matrices, rights, strict=True)]
    plain_work = average(plain, group) if plain else None
    left_work = average(lefts, group) if lefts else None

    def finish() -> Reduced:
        if plain_work is not None:
            plain_work.wait()
        if left_work is None:
            return gradient
        left_work.wait()
        bases = [_orthonormal(p, state.orthogonalization_epsilon) for p in lefts]
        averaged = [m.mT @ p for m, p in zip(matrices, bases, strict=True)]
        average(averaged, group).wait()
        state.rights[index] = averaged
        for number, p, q in zip(compressed, bases, averaged, strict=True):
            views[number].copy_((p @ q.mT).view(views[number].shape))
        if state.use_error_feedback:
            lost = torch.zeros_like(gradient)  # uncompressed gradients have no error
            parts = lost.split([view.numel() for view in views])
            for number, m in zip(compressed, matrices, strict=True):
                view = views[number]
                parts[number].as_strided(view.shape, view.stride()).copy_(m.view(view.shape) - view)
            state.errors[index] = lost.nan_to_num_(0, 0, 0)
        return gradient

    return DeferredFuture(finish)


def _orthonormal(columns: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Orthonormalizes the columns by QR if `epsilon` is 0, otherwise by Gram-Schmidt, as in torch's hook."""
    if epsilon == 0:
        basis: torch.Tensor = torch.linalg.qr(columns)[0]
        return basis
    columns = columns.clone()
    for index in range(columns.shape[1]):
        column = columns[:, index]
        column /= column.norm() + epsilon
        rest = columns[:, index + 1 :]
        rest -= torch.outer(column, column @ rest)
    return columns


powerSGD_hook = power_sgd_hook

__all__ = [
    "DeferredFuture",
    "GradBucket",
    "Int8State",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "collect_all",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "future_of",
    "int8_hook",
    "powerSGD_hook",
    "power_sgd_hook",
]
