"""What SharedModelOptimizer does in `Join`: a rank without inputs updates the parameters that it owns."""

from __future__ import annotations

from collections.abc import Callable

from paceline.parallel.join import JoinHook


class SharedJoinHook(JoinHook):
    """Takes part in the other ranks' steps without gradients of its own.

    Args:
        zero_grad: a function that clears the gradients.
        update: a function that makes the optimizer's step.
        divide_by: a function that is told whether gradients are divided by the number of all ranks.
        by_initial: whether they are.
    """

    def __init__(
        self,
        zero_grad: Callable[[], None],
        update: Callable[[], None],
        divide_by: Callable[[bool], None],
        by_initial: bool,
    ) -> None:
        self._zero_grad = zero_grad
        self._update = update
        self._divide_by = divide_by
        divide_by(by_initial)

    def main_hook(self) -> None:
        """Makes the step."""
        self._zero_grad()
        self._update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies no parameters, since all ranks have the same ones after every step."""
        self._divide_by(True)
