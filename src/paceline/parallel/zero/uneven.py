"""What ZeroRedundancyOptimizer does in `Join`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.parallel.join import JoinHook

if TYPE_CHECKING:
    from paceline.parallel.zero.optimizer import ZeroRedundancyOptimizer


class ZeroJoinHook(JoinHook):
    """Makes the other ranks' steps with them, so that what this rank owns is updated."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer, divide_by_initial_world_size: bool) -> None:
        self._optimizer = optimizer
        if optimizer._reducer is not None:
            optimizer._reducer.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """A backward without gradients, unless a wrapper averages, and the step."""
        reducer = self._optimizer._reducer
        if reducer is not None:
            self._optimizer.zero_grad()
            reducer.join_with_zeros()
        self._optimizer._update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have the same parameters after every step."""
        if self._optimizer._reducer is not None:
            self._optimizer._reducer.divide_by_initial_world_size = True
