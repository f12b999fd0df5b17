"""ModuleChecks: the checks for one wrapped module, called before and after its gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.group.process_group import ProcessGroup
from paceline.train.checks.check_settings import Checks
from paceline.train.checks.finite_check import GradientCheck
from paceline.train.checks.replica_check import ReplicaCheck
from paceline.train.module_tensors import TrackedTensors


class ModuleChecks:
    """Checks the gradients and, at intervals, the replicas of a wrapped module.

    If `with_buffers` is True, buffers are compared too, and must be equal on all ranks when a backward pass ends.
    """

    def __init__(
        self, module: nn.Module, tracked: TrackedTensors, group: ProcessGroup, checks: Checks, *, with_buffers: bool
    ) -> None:
        self.is_uneven = False  # True within `Join`, where replicas may differ until it ends
        self._step = 0
        self._gradients = GradientCheck(tracked.trained, group) if checks.are_on else None
        self._replicas: ReplicaCheck | None = None
        if checks.are_on and group.size() > 1:
            self._replicas = ReplicaCheck(module, tracked.ignored, group, checks.every, with_buffers=with_buffers)

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pieces: Sequence[int], dtype: int) -> None:
        """Checks this rank's gradients before they are averaged in place; see `GradientCheck.look`."""
        if self._gradients is not None:
            self._gradients.look(names, tensors, pieces, dtype)

    def look_at(self, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
        """Checks this rank's gradients, which may have any layout; None entries are skipped."""
        if self._gradients is not None:
            known = zip(names, gradients, strict=False)
            self._gradients.look_at({name: gradient for name, gradient in known if gradient is not None})

    def averaged(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Makes `end` also check these averages; see `GradientCheck.averaged`."""
        if self._gradients is not None:
            self._gradients.averaged([gradient for gradient in gradients if gradient is not None])

    def forget(self) -> None:
        """Discards the findings from a backward pass that does not average gradients."""
        if self._gradients is not None:
            self._gradients.forget()

    def end(self, averages: Sequence[torch.Tensor] | None = None) -> None:
        """Completes a backward pass whose gradients were averaged; all ranks must call it the same number of times.

        `averages` is None if the averages are in the gradients' memory.
        """
        self._step += 1
        if self._gradients is not None:
            self._gradients.end(self._step, averages)
        if self._replicas is not None and not self.is_uneven:
            self._replicas.end(self._step)

    def make_fewer_steps(self) -> None:
        """Excludes optimizers from comparisons, because they step less often on this rank than on other ranks."""
        self.is_uneven = True
        if self._replicas is not None:
            self._replicas.compares_optimizers = False

    def allow_differences(self) -> None:
        """Stops comparing the replicas, which may legitimately differ."""
        self._replicas = None
