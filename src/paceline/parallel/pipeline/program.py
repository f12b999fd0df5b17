"""A plan with the messages that it needs: what each rank computes, sends and receives, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.parallel.pipeline.plan import Phase, Plan, Task


class Cargo(Enum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Message:
    """What passes between two stages on different ranks.

    Attributes:
        stage: the stage whose output or input it is: an activation is the output of `stage`, and a gradient that of
            the input of `stage`.
    """

    cargo: Cargo
    stage: int
    micro_batch: int
    source: int
    target: int

    def __str__(self) -> str:
        made = "of stage" if self.cargo is Cargo.ACTIVATION else "of the input of stage"
        return f"the {self.cargo.value} {made} {self.stage}, micro-batch {self.micro_batch}"


class Action(Enum):
    """What a rank does with a message."""

    SEND = "send"
    """Starts to send what the task before has computed."""
    POST = "post"
    """Says where the message is to be put, without waiting for it."""
    AWAIT = "await"
    """Waits for a message that was posted."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """An action on a message."""

    action: Action
    message: Message


Step = Task | Transfer


@dataclass(frozen=True)
class Program:
    """Everything that the ranks do in a step.

    Attributes:
        steps: for each rank, in order.
    """

    plan: Plan
    steps: tuple[tuple[Step, ...], ...]


def needed(task: Task, plan: Plan) -> Message | None:
    """Returns the message that a task needs, or None if what it needs is on its rank."""
    own = plan.ranks_of_stages[task.stage]
    if task.phase is Phase.FORWARD and task.stage > 0:
        source = plan.ranks_of_stages[task.stage - 1]
        return None if source == own else Message(Cargo.ACTIVATION, task.stage - 1, task.micro_batch, source, own)
    if task.phase in (Phase.BACKWARD, Phase.INPUT) and task.stage < plan.stages - 1:
        source = plan.ranks_of_stages[task.stage + 1]
        return None if source == own else Message(Cargo.GRADIENT, task.stage + 1, task.micro_batch, source, own)
    return None


def made(task: Task, plan: Plan) -> Message | None:
    """Returns the message with what a task has computed, or None if it is used on its rank."""
    own = plan.ranks_of_stages[task.stage]
    if task.phase is Phase.FORWARD and task.stage < plan.stages - 1:
        target = plan.ranks_of_stages[task.stage + 1]
        return None if target == own else Message(Cargo.ACTIVATION, task.stage, task.micro_batch, own, target)
    if task.phase in (Phase.BACKWARD, Phase.INPUT) and task.stage > 0:
        target = plan.ranks_of_stages[task.stage - 1]
        return None if target == own else Message(Cargo.GRADIENT, task.stage, task.micro_batch, own, target)
    return None


def programmed(plan: Plan, posted_ahead: int = 1) -> Program:
    """Returns the plan with its messages.

    Args:
        posted_ahead: how many messages a rank posts before it needs them. With 1 a message arrives while the rank
            computes what comes before. With 0 a rank posts a message only when it is the next thing that it waits for:
            no post stands in the way of anything else, so that such a program ends even where messages of a rank
            block one another.
    """
    return Program(plan, tuple(_of_rank(order, plan, posted_ahead) for order in plan.orders))


def _of_rank(order: tuple[Task, ...], plan: Plan, posted_ahead: int) -> tuple[Step, ...]:
    wanted = [message for task in order if (message := needed(task, plan)) is not None]
    steps: list[Step] = [Transfer(Action.POST, message) for message in wanted[:posted_ahead]]
    taken = 0
    for task in order:
        message = needed(task, plan)
        if message is not None:
            steps += [Transfer(Action.POST, each) for each in wanted[taken + posted_ahead : taken + posted_ahead + 1]]
            steps.append(Transfer(Action.AWAIT, message))
            taken += 1
        steps.append(task)
        if (result := made(task, plan)) is not None:
            steps.append(Transfer(Action.SEND, result))
    return tuple(steps)
