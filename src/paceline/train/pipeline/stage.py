"""Stage: the computation of one stage, with forwards and backwards of micro-batches.

`DelayedWeights` defers the gradients of linear layers' weights, so that a backward first computes the gradients for
which other stages wait. In the backward of a linear layer y = x W' + b, the gradient of x is computed immediately, and
the operands of the gradients of W and b are kept for `finish`. The gradients of other layers' weights are computed
immediately, which is correct but defers less work. This follows the implementation of Qi et al. 2023, "Zero Bubble
Pipeline Parallelism".
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
"""One or several tensors that are passed between stages."""


class DelayedWeights(TorchFunctionMode):
    """A context in which linear layers defer the gradients of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Computes the deferred gradients, and adds them to the gradients of the weights."""
        for add in self._deferred:
            add()
        self._deferred.clear()

    def keep(self, input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Stores the operands of the gradients of a layer's weights."""

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
        """Replaces a linear layer whose weights are parameters that need gradients."""
        if func is functional.linear and torch.is_grad_enabled() and (layer := _layer(*args, **(kwargs or {}))):
            return _Linear.apply(*layer, self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns the arguments of a layer if its gradients can be deferred, or None."""
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
    """Some consecutive layers of a model.

    Args:
        layers: the layers, which are called sequentially; several outputs are passed as several arguments.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._forwards: dict[int, tuple[Value, Value]] = {}
        self._delayed: dict[int, DelayedWeights] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the layers, each once."""
        return list(nn.ModuleList(self._layers).parameters())

    def run(self, value: Value) -> Value:
        """Returns the output of the layers for `value`."""
        for layer in self._layers:
            output = layer(*value)
            value = output if isinstance(output, tuple) else (output,)
        return value

    def forward(
        self, micro_batch: int, value: Value, ending: Callable[[Value], torch.Tensor] | None, is_split: bool
    ) -> Value:
        """Runs a forward whose backward will follow.

        Args:
            micro_batch: the number of the micro-batch.
            value: the inputs.
            ending: a function that computes the loss from the last stage's output; the backward starts from the loss.
            is_split: whether to defer the gradients of weights until `weight`.

        Returns:
            The outputs, or the loss, without their graph.
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
        """Runs the backward of a micro-batch.

        Args:
            micro_batch: the number of the micro-batch.
            grads: the gradients of the outputs that need one, or () if the output is a loss.

        Returns:
            The gradients of the inputs that need one.
        """
        inputs, outputs = self._forwards.pop(micro_batch)
        trained = [output for output in outputs if output.requires_grad]
        if trained:
            torch.autograd.backward(trained, list(grads) or None)
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad)

    def weight(self, micro_batch: int) -> None:
        """Computes the gradients that the backward of a micro-batch deferred."""
        self._delayed.pop(micro_batch).finish()

    def forget(self) -> None:
        """Discards the state that a failed step left."""
        self._forwards.clear()
        self._delayed.clear()
