"""PowerSGD: gradients are sent as factors of low rank (Vogels et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.futures import AnyFuture, DeferredFuture
from paceline.parallel.ddp.hook import GradBucket, Reduced
from paceline.parallel.hooks.average import allreduce_hook, average, group_of


@dataclass
class PowerSGDState:
    """The state of `power_sgd_hook`; the arguments are torch's.

    Args:
        process_group: the ranks; None for the default group.
        matrix_approximation_rank: r; more is closer and costs more.
        start_powerSGD_iter: the number of steps, before gradients have settled, that are averaged uncompressed.
        min_compression_rate: a matrix of n x m elements is compressed if (n + m) r is that many times smaller than n m.
        use_error_feedback: add to each gradient the approximation error of the previous step.
        warm_start: begin the power iteration where that of the previous step ended.
        orthogonalization_epsilon: added to the norms that columns are divided by.
        random_seed: the seed of the first iteration; the same on every rank.
    """

    process_group: ProcessGroup | None = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    iter: int = 0
    errors: dict[int, torch.Tensor] = field(default_factory=dict)  # by bucket
    rights: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # Q of each matrix of a bucket

    def __post_init__(self) -> None:
        if self.matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank is {self.matrix_approximation_rank}; it must be at least 1")
        if self.start_powerSGD_iter < 0:
            raise ValueError(
                f"start_powerSGD_iter is {self.start_powerSGD_iter}; it is a number of steps and must not be negative"
            )

    def is_worth_it(self, gradient: torch.Tensor) -> bool:
        """Returns whether a gradient, as a matrix whose rows are its first dimension, is sent as factors."""
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        factors = (rows + columns) * self.matrix_approximation_rank
        return factors * self.min_compression_rate < rows * columns

    def first_right(self, index: int, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the Q that the iteration begins with."""
        shapes = [(each.shape[1], min(self.matrix_approximation_rank, *each.shape)) for each in matrices]
        known = self.rights.get(index)
        fits = known is not None and [q.shape for q in known] == shapes
        # The factors are not finite after gradients that were not.
        if self.warm_start and known is not None and fits and all(bool(q.isfinite().all()) for q in known):
            return known
        generator = torch.Generator().manual_seed(self.random_seed + self.iter * 1009 + index)
        return [torch.randn(shape, generator=generator) for shape in shapes]


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> AnyFuture[Reduced]:
    """Averages matrices M as P Qᵀ, with P and Q of r columns, and vectors as they are.

    Each step makes one power iteration: P = M Q, averaged and made orthonormal; then Q = Mᵀ P, averaged. The part of
    this rank's gradient that P Qᵀ leaves out is added to its next one.
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
    compressed = [at for at, each in enumerate(views) if state.is_worth_it(each)]
    plain = [each for at, each in enumerate(views) if at not in compressed]
    # The product is computed in float32 at least, whatever the gradients' type.
    wide = torch.promote_types(gradient.dtype, torch.float32)
    matrices = [views[at].reshape(len(views[at]), -1).to(wide, copy=True) for at in compressed]
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
        for at, p, q in zip(compressed, bases, averaged, strict=True):
            views[at].copy_((p @ q.mT).view(views[at].shape))
        if state.use_error_feedback:
            lost = torch.zeros_like(gradient)  # what was sent uncompressed has lost nothing
            parts = zip(bucket.parameters(), lost.split([p.numel() for p in bucket.parameters()]), strict=True)
            lost_of = [part.as_strided(p.shape, views[at].stride()) for at, (p, part) in enumerate(parts)]
            for at, m in zip(compressed, matrices, strict=True):
                lost_of[at].copy_(m.view(views[at].shape) - views[at])
            state.errors[index] = lost.nan_to_num_(0, 0, 0)
        return gradient

    return DeferredFuture(finish)


def _orthonormal(columns: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Orthogonalises the columns: with an epsilon by Gram-Schmidt, as torch's hook does, and without one by QR."""
    if epsilon == 0:
        basis: torch.Tensor = torch.linalg.qr(columns)[0]
        return basis
    columns = columns.clone()
    for at in range(columns.shape[1]):
        column = columns[:, at]
        column /= column.norm() + epsilon
        rest = columns[:, at + 1 :]
        rest -= torch.outer(column, column @ rest)
    return columns
