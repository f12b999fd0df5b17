"""Parameters whose gradients are averaged apart from all others (`delay_all_reduce_named_params`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

from paceline.group.eager import eager
from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.ddp.averaging import Averager
from paceline.parallel.ddp.fused_step import step_params, take_over_steps
from paceline.parallel.ddp.gradient_buckets import GradientBuckets
from paceline.parallel.graph import NO_BACKWARD, running_backward
from paceline.parallel.tracked_tensors import TrackedTensors, collect_tracked


class DelayedParameters:
    """Averages the gradients of some parameters at the end of each backward that reaches `trigger`.

    They are averaged in one call for each dtype, whatever buckets the other parameters have, and also within `no_sync`.
    A parameter without a gradient contributes zeros, as in torch.

    Args:
        module: the module that has the parameters.
        named: pairs of a name and a parameter.
        trigger: a parameter that requires a gradient.
        group: the ranks.
    """

    def __init__(
        self, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]], trigger: nn.Parameter, group: ProcessGroup
    ) -> None:
        self.params = dict(named)
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        sparse = collect_tracked(module).sparse & set(trained)
        tracked = TrackedTensors(trained, frozen={}, buffers={}, sparse=sparse, ignored=frozenset())
        self._gradients = GradientBuckets(tracked, [sys.maxsize])
        self._averager = Averager(self._gradients, group, compares_batches=False)
        self._stepped = take_over_steps(trained)
        self._group = group
        self._task = NO_BACKWARD  # the autograd engine's number of the backward that reached the trigger
        self._hook = trigger.register_hook(self._begin)

    def broadcast(self) -> None:
        """Copies rank 0's parameters to all ranks."""
        broadcast_tensors(list(self.params.values()), self._group)

    def close(self) -> None:
        """Takes the hook off the trigger; idempotent."""
        self._hook.remove()

    @eager
    def _begin(self, _: torch.Tensor) -> None:
        task = running_backward()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        for param, zero in zip(self._gradients.params, self._gradients.zeros(), strict=True):
            if param.grad is None:
                param.grad = zero
        self._averager.average_from(0, copy_shared=True)
        step_params(self._stepped)


def require_delayed(
    module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> list[tuple[str, nn.Parameter]]:
    """Returns the pairs of `named`, and requires that they are the module's.

    Raises:
        ValueError: a parameter does not have the name that it is paired with, or the trigger requires no gradient.
    """
    if named is None or trigger is None:
        return []
    pairs = list(named)
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in pairs:
        if known.get(name) is not param:
            raise ValueError(
                f"delay_all_reduce_named_params has a pair of {name!r} and a parameter that is not the module's "
                "parameter of this name; give pairs from module.named_parameters()"
            )
    if not trigger.requires_grad:
        raise ValueError(
            "param_to_hook_all_reduce requires no gradient, so the delayed parameters would never be averaged; give a "
            "parameter that is trained"
        )
    return pairs
