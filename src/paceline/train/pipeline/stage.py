"""Stage: the computation of one stage, that is, its forward and backward passes for micro-batches.

`DelayedWeights` defers the weight gradients of linear layers, so a backward pass first computes the gradients for which
other stages wait. The backward pass of a linear layer y = x W' + b computes the gradient of x immediately, and stores
the operands for the gradients of W and b until `finish`. The weight gradients of other layers are computed immediately,
which is correct but defers less work. The method follows the implementation of Qi et al. 2023, "Zero Bubble Pipeline
Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Value = tuple[torch.Tensor, ...]
"""A tuple of tensors that is passed between stages."""


class DelayedWeights(TorchFunctionMode):
    """A context in which linear layers defer their weight gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Computes the deferred gradients and accumulates them into the weights' `.grad`."""
        for add in self._deferred:
            add()
        self._deferred.clear()

    def keep(self, input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Stores the operands from which `finish` computes a layer's weight gradients."""

        def add() -> None:
            rows = grad.flatten(0, -2) if grad.ndim > 1 else grad.unsqueeze(0)
            columns = input.flatten(0, -2) if input.ndim > 1 else input.unsqueeze(0)
            _accumulate(weight, rows.t() @ columns)
            if bias is not None:
                _accumulate(bias, rows.sum(0))

        self._deferred.append(add)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces `functional.linear` with a deferring version if the layer's weight gradients can be deferred."""
        if func is functional.linear and torch.is_grad_enabled() and (layer := _layer(*args, **(kwargs or {}))):
            return _Linear.apply(*layer, self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns a layer's arguments if its weight gradients can be deferred, or None."""
    weights = [weight] if bias is None else [weight, bias]
    if not all(param.is_leaf and param.requires_grad and not param._backward_hooks for param in weights):
        return None
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return input, weight, bias


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, delayed: DelayedWeights
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


class Stage:
    """A pipeline stage, which consists of consecutive layers of a model.

    Args:
        layers: the layers, which are called sequentially; a tuple output is passed as separate arguments.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._forwards: dict[int, tuple[Value, Value]] = {}
        self._delayed: dict[int, DelayedWeights] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all layers, without duplicates."""
        return list(nn.ModuleList(self._layers).parameters())

    def run(self, value: Value) -> Value:
        """Calls the layers sequentially and returns the last output."""
        for layer in self._layers:
            output = layer(*value)
            value = output if isinstance(output, tuple) else (output,)
        return value

    def forward(
        self, micro_batch: int, value: Value, ending: Callable[[Value], torch.Tensor] | None, is_split: bool
    ) -> Value:
        """Runs a forward pass and keeps its graph for the backward pass.

        Args:
            micro_batch: the index of the micro-batch.
            value: the inputs.
            ending: a function that computes the loss from the output of the last stage, or None in other stages.
            is_split: whether to defer weight gradients until `weight` is called.

        Returns:
            The outputs, or the loss if `ending` is given, detached from the graph.
        """
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in value)
        if is_split:
            self._delayed[micro_batch] = DelayedWeights()
            with self._delayed[micro_batch]:
                outputs = self.run(inputs)
        else:
            outputs = self.run(inputs)
        if ending is not None:
            outputs = (ending(outputs),)
        self._forwards[micro_batch] = (inputs, outputs)
        return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)

    def backward(self, micro_batch: int, grads: Value) -> Value:
        """Runs the backward pass for a micro-batch.

        Args:
            micro_batch: the index of the micro-batch.
            grads: the gradients of those outputs that require one, or () if the output is a loss.

        Returns:
            The gradients of those inputs that require one.
        """
        inputs, outputs = self._forwards.pop(micro_batch)
        trained = [output for output in outputs if output.requires_grad]
        if trained:
            torch.autograd.backward(trained, list(grads) or None)
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad)

    def weight(self, micro_batch: int) -> None:
        """Computes the weight gradients that the backward pass of a micro-batch has deferred."""
        self._delayed.pop(micro_batch).finish()

    def forget(self) -> None:
        """Discards all state from a failed step."""
        self._forwards.clear()
        self._delayed.clear()
