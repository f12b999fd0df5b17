"""Carries out a rank's part of a program for one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.parallel.pipeline.plan import Phase, Task
from paceline.parallel.pipeline.program import Action, Cargo, Program, Transfer
from paceline.parallel.pipeline.stage import Stage, Value
from paceline.parallel.pipeline.transfer import Forms, Transfers

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
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        transfers: Transfers,
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
        self._is_split = Phase.WEIGHT in phases
        self._is_training = len(phases) > 1
        adds = [task for task in self._plan.orders[rank] if task.phase in (Phase.BACKWARD, Phase.WEIGHT)]
        self._last_adds = set({task.stage: task for task in adds}.values())

    def run(self) -> list[Value]:
        """Returns the outputs of the last stage, or its losses, for each micro-batch; none if it is elsewhere."""
        for step in self._steps:
            if isinstance(step, Transfer):
                self._transfer(step)
            elif step.phase is Phase.FORWARD:
                self._forward(step)
            else:
                self._backward(step)
        self._transfers.finish()
        self._forms.is_known = True
        return self._outputs

    def _transfer(self, step: Transfer) -> None:
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
        if task.phase is Phase.WEIGHT:
            stage.weight(task.micro_batch)
        else:
            grads = () if is_last else self._values.pop((Cargo.GRADIENT, task.stage + 1, task.micro_batch))
            passed = stage.backward(task.micro_batch, grads)
            if task.stage:
                self._values[Cargo.GRADIENT, task.stage, task.micro_batch] = passed
        if task in self._last_adds:
            self._has_gradients(stage)
