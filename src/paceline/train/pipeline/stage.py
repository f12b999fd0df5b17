"""The computation of one stage: forwards and backwards of micro-batches.

Puts off the gradients of linear layers' weights, so that a backward computes what other stages wait for first.

In the backward of a linear layer y = x W' + b, the gradient of x is passed on at once, and what is needed for that of W
and b is kept; `Delayed.finish` computes it later. Other layers' weights get their gradients at once, which is right but
shifts less work. The idea is that of the implementation of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Delayed(TorchFunctionMode):
    """While it is entered, linear layers put off the gradients of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Adds the gradients that were put off to those of the weights."""
        for each in self._kept:
            each()
        self._kept.clear()

    def keep(self, input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Notes what the gradients of a layer's weights are computed from."""

        def add() -> None:
            rows = grad.flatten(0, -2) if grad.ndim > 1 else grad.unsqueeze(0)
            columns = input.flatten(0, -2) if input.ndim > 1 else input.unsqueeze(0)
            _accumulate(weight, rows.t() @ columns)
            if bias is not None:
                _accumulate(bias, rows.sum(0))

        self._kept.append(add)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces a linear layer whose weights are parameters that need gradients."""
        if func is functional.linear and torch.is_grad_enabled() and (layer := _layer(*args, **(kwargs or {}))):
            return _Linear.apply(*layer, self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns the arguments of a layer whose gradients can be put off; None if they cannot."""
    weights = [weight] if bias is None else [weight, bias]
    if not all(each.is_leaf and each.requires_grad and not each._backward_hooks for each in weights):
        return None
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return input, weight, bias


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, delayed: Delayed
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weights, ctx.delayed = (weight, bias), delayed
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (input,), (weight, bias) = ctx.saved_tensors, ctx.weights
        ctx.delayed.keep(input.detach(), grad.detach(), weight, bias)
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None


def _accumulate(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)
        else:
            parameter.grad += grad


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
