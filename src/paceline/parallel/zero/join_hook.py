"""What ZeroRedundancyOptimizer does in `Join`: a rank without inputs updates the parameters that it owns."""

from __future__ import annotations

from collections.abc import Callable

from paceline.parallel.join import JoinHook
from paceline.parallel.zero.gradients import GradientReducer


class ZeroJoinHook(JoinHook):
    """Takes part in the other ranks' steps.

    Args:
        reducer: the optimizer's reducer, None if a wrapper averages the gradients.
        zero_grad: a function that clears the gradients.
        update: a function that makes the optimizer's step.
        divide_by_initial_world_size: whether gradients are divided by the number of all ranks.
    """

    def __init__(
        self,
        reducer: GradientReducer | None,
        zero_grad: Callable[[], None],
        update: Callable[[], None],
        divide_by_initial_world_size: bool,
    ) -> None:
        self._reducer = reducer
        self._zero_grad = zero_grad
        self._update = update
        if reducer is not None:
            reducer.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Takes part without gradients in a backward, unless a wrapper averages, and makes the step."""
        if self._reducer is not None:
            self._zero_grad()
            self._reducer.join_with_zeros()
        self._update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies no parameters, since all ranks have the same ones after every step."""
        if self._reducer is not None:
            self._reducer.divide_by_initial_world_size = True
