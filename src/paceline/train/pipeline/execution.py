"""Execution: performs the computations and transfers in a rank's part of a program, for one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.comm.engine.channel import DTYPE_CODES, DTYPES
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.pipeline.program import (
    Action,
    MessageContent,
    PipelinePhase,
    PipelineProgram,
    StageMessage,
    StageTransfer,
    Task,
)

Value = tuple[torch.Tensor, ...]
"""A tuple of tensors that is passed between stages."""


class DelayedWeights(TorchFunctionMode):
    """A context in which linear layers defer their weight gradients.

    A backward pass then first computes the gradients that other stages are waiting for. The backward pass of a linear
    layer y = x W' + b computes the gradient of x immediately, and stores the operands for the gradients of W and b
    until `finish`. The weight gradients of other layers are computed immediately, which is correct but defers less
    work. The method follows the implementation of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """

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
    """A pipeline stage: consecutive layers of a model. A layer's tuple output is passed on as separate arguments."""

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

        Returns the outputs, detached from the graph; in the last stage, returns the loss, which `ending` computes from
        the output. If `is_split` is True, weight gradients are deferred until `weight` is called.
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
        """Runs the backward pass for a micro-batch; returns the gradients of those inputs that require one.

        `grads` contains the gradients of those outputs that require one, and is empty if the output is a loss.
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


_MOST_TENSORS = 8
_MOST_DIMENSIONS = 8
_TENSOR_LENGTH = 3 + _MOST_DIMENSIONS  # dtype, needs_grad, number of dimensions, shape
_HEADER_LENGTH = 1 + _MOST_TENSORS * _TENSOR_LENGTH  # number of tensors, then a description of each

Ending = Callable[[Value], torch.Tensor]
"""A function that computes a micro-batch's loss from the last stage's output."""


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor in a message, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass
class Forms:
    """The forms of a step's messages for one batch size, recorded in the first step with this batch size."""

    is_known: bool = False
    of: dict[StageMessage, tuple[TensorForm, ...]] = field(default_factory=dict)


class StageTransport:
    """Sends and receives a rank's messages; received tensors are on `device`."""

    def __init__(self, group: ProcessGroup, micro_batches: int, device: torch.device) -> None:
        self._group = group
        self._micro_batches = micro_batches  # determines the tags of messages
        self._device = device
        self._sending: deque[tuple[Work, ...]] = deque()
        self._posted: dict[StageMessage, tuple[Value, list[Work]]] = {}
        self._left: list[Work] = []

    def send(self, message: StageMessage, value: Value, forms: Forms) -> None:
        """Starts sending the tensors in a message.

        Raises:
            ValueError: there are too many tensors, or they have too many dimensions.
            RuntimeError: the form differs from that in an earlier step with the same batch size.
        """
        form = tuple(TensorForm(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in value)
        works: list[Work] = []
        if not forms.is_known:
            works.append(self._isend(_header(message, form), message, 0))
            forms.of[message] = form
        elif forms.of[message] != form:
            raise RuntimeError(
                f"{self._group.me}: pipeline: {message}, has become {_form_text(form)}; with a batch of this size it "
                f"was {_form_text(forms.of[message])}. The outputs of a stage must depend on the sizes of its inputs "
                "only"
            )
        works += [self._isend(tensor.detach().contiguous(), message, i) for i, tensor in enumerate(value, start=1)]
        self._sending.append(tuple(works))

    def post(self, message: StageMessage, forms: Forms) -> None:
        """Starts receiving the tensors in a message if their form is known."""
        if forms.is_known:
            self._posted[message] = self._irecv(message, forms.of[message])

    def take(self, message: StageMessage, forms: Forms) -> Value:
        """Waits for a message that was posted, and returns its tensors."""
        if not forms.is_known:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
            self._group.recv(header, message.source, self._tag(message, 0)).wait()
            forms.of[message] = _form(header.tolist())
            self._posted[message] = self._irecv(message, forms.of[message])
        value, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return value

    def finish(self) -> None:
        """Waits until all messages have been sent."""
        while self._sending:
            for work in self._sending.popleft():
                work.wait()

    def forget(self) -> None:
        """Discards a failed step. Its `Work` objects are kept, because deleting one would wait for the other rank."""
        self._left += [work for works in self._sending for work in works]
        self._left += [work for _, works in self._posted.values() for work in works]
        self._sending.clear()
        self._posted.clear()

    def _isend(self, tensor: torch.Tensor, message: StageMessage, part: int) -> Work:
        work = self._group.send(tensor, message.target, self._tag(message, part), True)
        assert work is not None, "it was started in the background"
        return work

    def _irecv(self, message: StageMessage, form: tuple[TensorForm, ...]) -> tuple[Value, list[Work]]:
        value = tuple(torch.empty(item.shape, dtype=item.dtype, device=self._device) for item in form)
        works = [
            self._group.recv(tensor, message.source, self._tag(message, i), True)
            for i, tensor in enumerate(value, start=1)
        ]
        return tuple(t.requires_grad_(item.needs_grad) for t, item in zip(value, form, strict=True)), works

    def _tag(self, message: StageMessage, part: int) -> int:
        content = list(MessageContent).index(message.content)
        number = (message.stage * self._micro_batches + message.micro_batch) * len(MessageContent) + content
        return number * (_MOST_TENSORS + 1) + part


def _header(message: StageMessage, form: tuple[TensorForm, ...]) -> torch.Tensor:
    dimensions = max((len(item.shape) for item in form), default=0)
    if len(form) > _MOST_TENSORS or dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"pipeline: {message}, is {len(form)} tensors with up to {dimensions} dimensions; at most {_MOST_TENSORS} "
            f"tensors of {_MOST_DIMENSIONS} dimensions can pass between stages"
        )
    numbers = [len(form)]
    for item in form:
        padding = [0] * (_MOST_DIMENSIONS - len(item.shape))
        numbers += [DTYPE_CODES[item.dtype], int(item.needs_grad), len(item.shape), *item.shape, *padding]
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)), device="cpu")


def _form(numbers: list[int]) -> tuple[TensorForm, ...]:
    parts = [numbers[1 + i * _TENSOR_LENGTH : 1 + (i + 1) * _TENSOR_LENGTH] for i in range(numbers[0])]
    return tuple(TensorForm(tuple(p[3 : 3 + p[2]]), DTYPES[p[0]], bool(p[1])) for p in parts)


def _form_text(form: tuple[TensorForm, ...]) -> str:
    return ", ".join(f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}" for item in form)


class Execution:
    """Runs one batch through a rank's stages.

    Args:
        program: the program of the pipeline.
        rank: the index of this rank in the pipeline.
        stages: this rank's stages, by stage number.
        transport, forms: the transport for messages, and their forms for this batch size.
        inputs: the micro-batches, if this rank has the first stage.
        endings: the loss function for each micro-batch, if this rank has the last stage and a backward pass will
            follow.
        has_gradients: a function that is called with a stage when the stage's gradients are complete.
    """

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        stages: Mapping[int, Stage],
        transport: StageTransport,
        forms: Forms,
        inputs: Sequence[Value],
        endings: Sequence[Ending],
        has_gradients: Callable[[Stage], None],
    ) -> None:
        self._plan = program.plan
        self._steps = program.steps[rank]
        self._stages = stages
        self._transport = transport
        self._forms = forms
        self._endings = endings
        self._has_gradients = has_gradients
        self._values = {(MessageContent.ACTIVATION, -1, number): value for number, value in enumerate(inputs)}
        self._outputs: list[Value] = []
        order = self._plan.orders[rank]
        phases = {task.phase for task in order}
        self._is_split = PipelinePhase.WEIGHT in phases
        self._is_training = len(phases) > 1
        adds = {task.stage: task for task in order if task.phase in (PipelinePhase.BACKWARD, PipelinePhase.WEIGHT)}
        self._last_adds = set(adds.values())

    def run(self) -> list[Value]:
        """Runs all steps; returns each micro-batch's output or loss on the last stage's rank, and [] on other ranks."""
        for step in self._steps:
            if isinstance(step, StageTransfer):
                self._transfer(step)
            elif step.phase is PipelinePhase.FORWARD:
                self._forward(step)
            else:
                self._backward(step)
        self._transport.finish()
        self._forms.is_known = True
        return self._outputs

    def _transfer(self, step: StageTransfer) -> None:
        message = step.message
        key = (message.content, message.stage, message.micro_batch)
        if step.action is Action.POST:
            self._transport.post(message, self._forms)
        elif step.action is Action.AWAIT:
            self._values[key] = self._transport.take(message, self._forms)
        else:
            self._transport.send(message, self._values.pop(key), self._forms)

    def _forward(self, task: Task) -> None:
        stage, is_last = self._stages[task.stage], task.stage == self._plan.stages - 1
        value = self._values.pop((MessageContent.ACTIVATION, task.stage - 1, task.micro_batch))
        if self._is_training:
            ending = self._endings[task.micro_batch] if is_last else None
            value = stage.forward(task.micro_batch, value, ending, self._is_split)
        else:
            value = stage.run(value)
        if is_last:
            self._outputs.append(value)
        else:
            self._values[MessageContent.ACTIVATION, task.stage, task.micro_batch] = value

    def _backward(self, task: Task) -> None:
        stage, is_last = self._stages[task.stage], task.stage == self._plan.stages - 1
        if task.phase is PipelinePhase.WEIGHT:
            stage.weight(task.micro_batch)
        else:
            grads = () if is_last else self._values.pop((MessageContent.GRADIENT, task.stage + 1, task.micro_batch))
            passed = stage.backward(task.micro_batch, grads)
            if task.stage:
                self._values[MessageContent.GRADIENT, task.stage, task.micro_batch] = passed
        if task in self._last_adds:
            self._has_gradients(stage)
