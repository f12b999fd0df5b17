"""Hooks on the outputs of a forward, which show that a backward has begun."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from paceline.group.eager import eager
from paceline.parallel.graph import NO_BACKWARD, running_backward

Begin = Callable[[int], None]


class OutputHooks:
    """Notices each backward that reaches an output of a forward.

    Attributes:
        task: the autograd engine's number of the backward that runs, which its owner sets once it knows.
        unreached: the number of outputs that no backward has reached: their gradients may still be computed.
        in_other: whether a backward runs that has reached an output of a forward which nobody watches.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        self.unreached = 0
        self.in_other = False

    def forget(self) -> None:
        """Forgets the outputs of earlier forwards and their backward."""
        self.task = NO_BACKWARD
        self.unreached = 0

    def watch(self, outputs: Iterable[torch.Tensor], begin: Begin) -> None:
        """Makes a backward that reaches one of `outputs` call `begin` with its number, unless that is `task` already.

        Args:
            outputs: tensors of a forward that require gradients.
            begin: the function to call.
        """
        self.in_other = False
        for tensor in outputs:
            self.unreached += 1
            tensor.register_hook(self._hook(begin, is_counted=True))

    def watch_recomputed(self, outputs: Iterable[torch.Tensor], begin: Begin) -> None:
        """Does what `watch` does, for outputs that were computed again and are counted already."""
        for tensor in outputs:
            tensor.register_hook(self._hook(begin, is_counted=False))

    def tell_apart(self, others: Iterable[torch.Tensor]) -> None:
        """Makes `in_other` true during each backward that reaches one of `others`, of a forward that is not watched."""

        @eager
        def reach(_: torch.Tensor) -> None:
            if not self.in_other:
                self.in_other = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_other)

        for tensor in others:
            tensor.register_hook(reach)

    @eager
    def _end_other(self) -> None:
        self.in_other = False

    def _hook(self, begin: Begin, is_counted: bool) -> Callable[[torch.Tensor], None]:
        @eager
        def reach(_: torch.Tensor) -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self.unreached -= 1
            task = running_backward()
            if task != self.task:
                begin(task)

        return reach
