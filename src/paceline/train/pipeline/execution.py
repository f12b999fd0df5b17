"""Carries out a rank's part of a program for one batch.

Carries activations and gradients between the stages of different ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.engine.codes import DTYPE_CODES, DTYPES
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.pipeline.program import Action, Cargo, PipelineProgram, StageMessage, StageTransfer
from paceline.train.pipeline.schedule import PipelinePhase, Task
from paceline.train.pipeline.stage import Stage, Value

_MOST_TENSORS = 8
_MOST_DIMENSIONS = 8
_HEADER = 1 + _MOST_TENSORS * (3 + _MOST_DIMENSIONS)
"""A header has the number of tensors, and for each its dtype, whether it needs a gradient, its dimensions and shape."""


@dataclass(frozen=True)
class TensorForm:
    """What one tensor of a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass
class Forms:
    """What the messages of a step look like, for one size of a batch; filled in when the first such step runs."""

    is_known: bool = False
    of: dict[StageMessage, tuple[TensorForm, ...]] = field(default_factory=dict)


class StageTransport:
    """The messages of a rank.

    Args:
        group: the ranks of the pipeline.
        micro_batches: how many there are, which numbers the messages' tags.
        device: where received tensors are put.
    """

    def __init__(self, group: ProcessGroup, micro_batches: int, device: torch.device) -> None:
        self._group = group
        self._micro_batches = micro_batches
        self._device = device
        self._sending: deque[tuple[Work, ...]] = deque()
        self._posted: dict[StageMessage, tuple[Value, list[Work]]] = {}
        self._left: list[Work] = []

    def send(self, message: StageMessage, value: Value, forms: Forms) -> None:
        """Starts to send the tensors.

        Raises:
            ValueError: there are too many of them, or with too many dimensions.
            RuntimeError: they look other than in an earlier step with a batch of this size.
        """
        form = tuple(TensorForm(tuple(each.shape), each.dtype, each.requires_grad) for each in value)
        works: list[Work] = []
        if not forms.is_known:
            works.append(self._isend(_header(message, form), message, 0))
            forms.of[message] = form
        elif forms.of[message] != form:
            raise RuntimeError(
                f"{self._group.me}: pipeline: {message}, has become {_said(form)}; with a batch of this size it was "
                f"{_said(forms.of[message])}. The outputs of a stage must depend on the sizes of its inputs only"
            )
        works += [self._isend(each.detach().contiguous(), message, 1 + at) for at, each in enumerate(value)]
        self._sending.append(tuple(works))

    def post(self, message: StageMessage, forms: Forms) -> None:
        """Starts to receive the tensors, if it is known what they look like."""
        if forms.is_known:
            self._posted[message] = self._irecv(message, forms.of[message])

    def take(self, message: StageMessage, forms: Forms) -> Value:
        """Returns the tensors of a message that was posted."""
        if not forms.is_known:
            header = torch.empty(_HEADER, dtype=torch.int64)
            self._group.recv(header, message.source, self._tag(message, 0)).wait()
            forms.of[message] = _form(header.tolist())
            self._posted[message] = self._irecv(message, forms.of[message])
        value, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return value

    def finish(self) -> None:
        """Waits until all is sent."""
        while self._sending:
            for work in self._sending.popleft():
                work.wait()

    def forget(self) -> None:
        """Puts aside what a step that failed has left: a `Work` that is dropped waits for the other rank."""
        self._left += [work for works in self._sending for work in works]
        self._left += [work for _, works in self._posted.values() for work in works]
        self._sending.clear()
        self._posted.clear()

    def _isend(self, tensor: torch.Tensor, message: StageMessage, part: int) -> Work:
        work = self._group.send(tensor, message.target, self._tag(message, part), True)
        assert work is not None, "it was started in the background"
        return work

    def _irecv(self, message: StageMessage, form: tuple[TensorForm, ...]) -> tuple[Value, list[Work]]:
        value = tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in form)
        works = [
            self._group.recv(each, message.source, self._tag(message, 1 + at), True) for at, each in enumerate(value)
        ]
        return tuple(t.requires_grad_(each.needs_grad) for t, each in zip(value, form, strict=True)), works

    def _tag(self, message: StageMessage, part: int) -> int:
        cargo = list(Cargo).index(message.cargo)
        number = (message.stage * self._micro_batches + message.micro_batch) * len(Cargo) + cargo
        return number * (_MOST_TENSORS + 1) + part


def _header(message: StageMessage, form: tuple[TensorForm, ...]) -> torch.Tensor:
    dimensions = max((len(each.shape) for each in form), default=0)
    if len(form) > _MOST_TENSORS or dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"pipeline: {message}, is {len(form)} tensors with up to {dimensions} dimensions; at most {_MOST_TENSORS} "
            f"tensors of {_MOST_DIMENSIONS} dimensions can pass between stages"
        )
    numbers = [len(form)]
    for each in form:
        padding = [0] * (_MOST_DIMENSIONS - len(each.shape))
        numbers += [DTYPE_CODES[each.dtype], int(each.needs_grad), len(each.shape), *each.shape, *padding]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device="cpu")


def _form(numbers: list[int]) -> tuple[TensorForm, ...]:
    each = 3 + _MOST_DIMENSIONS
    parts = [numbers[1 + at * each : 1 + (at + 1) * each] for at in range(numbers[0])]
    return tuple(TensorForm(tuple(p[3 : 3 + p[2]]), DTYPES[p[0]], bool(p[1])) for p in parts)


def _said(form: tuple[TensorForm, ...]) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in form)


Ending = Callable[[Value], torch.Tensor]
"""Turns the last stage's output for a micro-batch into its loss."""


class Execution:
    """One batch on its way through the stages of a rank.

    Args:
        rank: this rank's number in the pipeline.
        stages: those of this rank, by number.
        forms: what the messages look like with a batch of this size.
        inputs: the micro-batches, if the first stage is here.
        endings: for each micro-batch, if a backward will follow and the last stage is here.
        has_gradients: called with a stage when no more is added to its gradients.
    """

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        stages: Mapping[int, Stage],
        transfers: StageTransport,
        forms: Forms,
        inputs: Sequence[Value],
        endings: Sequence[Ending] = (),
        has_gradients: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        self._plan = program.plan
        self._steps = program.steps[rank]
        self._stages = stages
        self._transfers = transfers
        self._forms = forms
        self._endings = endings
        self._has_gradients = has_gradients
        self._values = {(Cargo.ACTIVATION, -1, at): value for at, value in enumerate(inputs)}
        self._outputs: list[Value] = []
        phases = {task.phase for task in self._plan.orders[rank]}
        self._is_split = PipelinePhase.WEIGHT in phases
        self._is_training = len(phases) > 1
        adds = [
            task for task in self._plan.orders[rank] if task.phase in (PipelinePhase.BACKWARD, PipelinePhase.WEIGHT)
        ]
        self._last_adds = set({task.stage: task for task in adds}.values())

    def run(self) -> list[Value]:
        """Returns the outputs of the last stage, or its losses, for each micro-batch; none if it is elsewhere."""
        for step in self._steps:
            if isinstance(step, StageTransfer):
                self._transfer(step)
            elif step.phase is PipelinePhase.FORWARD:
                self._forward(step)
            else:
                self._backward(step)
        self._transfers.finish()
        self._forms.is_known = True
        return self._outputs

    def _transfer(self, step: StageTransfer) -> None:
        message = step.message
        what = (message.cargo, message.stage, message.micro_batch)
        if step.action is Action.POST:
            self._transfers.post(message, self._forms)
        elif step.action is Action.AWAIT:
            self._values[what] = self._transfers.take(message, self._forms)
        else:
            self._transfers.send(message, self._values.pop(what), self._forms)

    def _forward(self, task: Task) -> None:
        stage, is_last = self._stages[task.stage], task.stage == self._plan.stages - 1
        value = self._values.pop((Cargo.ACTIVATION, task.stage - 1, task.micro_batch))
        if self._is_training:
            ending = self._endings[task.micro_batch] if is_last else None
            value = stage.forward(task.micro_batch, value, ending, self._is_split)
        else:
            value = stage.run(value)
        if is_last:
            self._outputs.append(value)
        else:
            self._values[Cargo.ACTIVATION, task.stage, task.micro_batch] = value

    def _backward(self, task: Task) -> None:
        stage, is_last = self._stages[task.stage], task.stage == self._plan.stages - 1
        if task.phase is PipelinePhase.WEIGHT:
            stage.weight(task.micro_batch)
        else:
            grads = () if is_last else self._values.pop((Cargo.GRADIENT, task.stage + 1, task.micro_batch))
            passed = stage.backward(task.micro_batch, grads)
            if task.stage:
                self._values[Cargo.GRADIENT, task.stage, task.micro_batch] = passed
        if task in self._last_adds:
            self._has_gradients(stage)
