"""Calls functions at the end of a backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.group.eager import eager
from paceline.parallel.graph import NO_BACKWARD, running_backward


class BackwardEnd:
    """Calls `callbacks`, in order, at the end of each backward in which `begin` was called."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self._task = NO_BACKWARD

    def begin(self) -> None:
        """Notes that a backward is running; hooks call this.

        Raises:
            RuntimeError: another backward has begun and not ended.
        """
        task = running_backward()
        if task == self._task:
            return
        if self._task != NO_BACKWARD:
            raise RuntimeError(
                "a backward of parameters that ZeroRedundancyOptimizer shards has begun before another one had ended. "
                "If it runs within the other one, use checkpoint(..., use_reentrant=False); if the other one has "
                "failed, call zero_grad() first"
            )
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def forget(self) -> None:
        """Forgets a backward that failed and will not end."""
        self._task = NO_BACKWARD

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        for callback in self.callbacks:
            callback()
