"""The computation of one stage: forwards and backwards of micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.parallel.pipeline.delayed_weights import Delayed

Value = tuple[torch.Tensor, ...]
"""What passes between stages: one tensor or several."""


class Stage:
    """Some consecutive layers of a model.

    Args:
        layers: they are called one after the other; several outputs become several arguments.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._forwards: dict[int, tuple[Value, Value]] = {}
        self._delayed: dict[int, Delayed] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the layers, each once."""
        return list(nn.ModuleList(self._layers).parameters())

    def run(self, value: Value) -> Value:
        """Returns what the layers make of `value`."""
        for layer in self._layers:
            output = layer(*value)
            value = output if isinstance(output, tuple) else (output,)
        return value

    def forward(
        self, micro_batch: int, value: Value, ending: Callable[[Value], torch.Tensor] | None, is_split: bool
    ) -> Value:
        """Runs a forward whose backward will follow.

        Args:
            ending: turns the last stage's output into a loss, from which the backward starts.
            is_split: whether the gradients of weights are put off until `weight`.

        Returns:
            The outputs, or the loss, without their graph.
        """
        inputs = tuple(each.detach().requires_grad_(each.requires_grad) for each in value)
        if is_split:
            self._delayed[micro_batch] = Delayed()
            with self._delayed[micro_batch]:
                outputs = self.run(inputs)
        else:
            outputs = self.run(inputs)
        if ending is not None:
            outputs = (ending(outputs),)
        self._forwards[micro_batch] = (inputs, outputs)
        return tuple(each.detach().requires_grad_(each.requires_grad) for each in outputs)

    def backward(self, micro_batch: int, grads: Value) -> Value:
        """Runs the backward of a micro-batch.

        Args:
            grads: the gradients of the outputs that need one; of a loss there is none.

        Returns:
            The gradients of the inputs that need one.
        """
        inputs, outputs = self._forwards.pop(micro_batch)
        needing = [each for each in outputs if each.requires_grad]
        if needing:
            torch.autograd.backward(needing, list(grads) or None)
        return tuple(
            torch.zeros_like(each) if each.grad is None else each.grad for each in inputs if each.requires_grad
        )

    def weight(self, micro_batch: int) -> None:
        """Computes the gradients that the backward of a micro-batch put off."""
        self._delayed.pop(micro_batch).finish()

    def forget(self) -> None:
        """Drops what a step that failed has left."""
        self._forwards.clear()
        self._delayed.clear()
