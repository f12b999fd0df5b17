"""The checks of one wrapped module, as whoever averages its gradients calls them."""

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
    """Checks the gradients of each backward, and now and then the replicas.

    Args:
        module: the module that is wrapped.
        tracked: its tensors.
        group: the ranks.
        checks: what the user has said.
        with_buffers: whether buffers are the same on all ranks at the end of a backward.
    """

    def __init__(
        self, module: nn.Module, tracked: TrackedTensors, group: ProcessGroup, checks: Checks, *, with_buffers: bool
    ) -> None:
        self.is_uneven = False  # within `Join`, where ranks without inputs keep their parameters until its end
        self._step = 0
        self._gradients = GradientCheck(tracked.trained, group) if checks.are_on else None
        self._replicas: ReplicaCheck | None = None
        if checks.are_on and group.size() > 1:
            self._replicas = ReplicaCheck(module, tracked.ignored, group, checks.every, with_buffers=with_buffers)

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pieces: Sequence[int], dtype: int) -> None:
        """Looks at gradients of this rank; see `GradientCheck.look`."""
        if self._gradients is not None:
            self._gradients.look(names, tensors, pieces, dtype)

    def look_at(self, names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
        """Looks at those gradients of this rank that there are, wherever they lie."""
        if self._gradients is not None:
            found = [(name, each) for name, each in zip(names, gradients, strict=False) if each is not None]
            self._gradients.look_at([name for name, _ in found], [each for _, each in found])

    def averaged(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes averages that are elsewhere than the gradients were; see `GradientCheck.averaged`."""
        if self._gradients is not None:
            self._gradients.averaged([each for each in gradients if each is not None])

    def forget(self) -> None:
        """Forgets a backward whose gradients are not averaged."""
        if self._gradients is not None:
            self._gradients.forget()

    def end(self, averages: Sequence[torch.Tensor] | None = None) -> None:
        """Ends a backward whose gradients were averaged; all ranks call it equally often.

        Args:
            averages: the averages, unless they are where the gradients were.

        Raises:
            CollectiveError: the replicas could not be compared.
        """
        self._step += 1
        if self._gradients is not None:
            self._gradients.end(self._step, averages)
        if self._replicas is not None and not self.is_uneven:
            self._replicas.end(self._step)

    def make_fewer_steps(self) -> None:
        """Notes that this rank's optimizer makes fewer steps than others, so that its state is its own."""
        self.is_uneven = True
        if self._replicas is not None:
            self._replicas.compares_optimizers = False

    def allow_differences(self) -> None:
        """Stops comparing the replicas, since something of the user's averages gradients, maybe not over all ranks."""
        self._replicas = None
