"""A plan with the messages that it needs: what each rank computes, sends and receives, in order.

Shows that a program computes what it should, in an order that cannot hang, and what it keeps in memory.

How long a plan takes, if each task and each message takes a given time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.train.pipeline.schedule import PipelinePhase, PipelineSchedule, Task


class Cargo(Enum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class StageMessage:
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
class StageTransfer:
    """An action on a message."""

    action: Action
    message: StageMessage


Step = Task | StageTransfer


@dataclass(frozen=True)
class PipelineProgram:
    """Everything that the ranks do in a step.

    Attributes:
        steps: for each rank, in order.
    """

    plan: PipelineSchedule
    steps: tuple[tuple[Step, ...], ...]


def message_needed_by(task: Task, plan: PipelineSchedule) -> StageMessage | None:
    """Returns the message that a task needs, or None if what it needs is on its rank."""
    own = plan.ranks_of_stages[task.stage]
    if task.phase is PipelinePhase.FORWARD and task.stage > 0:
        source = plan.ranks_of_stages[task.stage - 1]
        return None if source == own else StageMessage(Cargo.ACTIVATION, task.stage - 1, task.micro_batch, source, own)
    if task.phase in (PipelinePhase.BACKWARD, PipelinePhase.INPUT) and task.stage < plan.stages - 1:
        source = plan.ranks_of_stages[task.stage + 1]
        return None if source == own else StageMessage(Cargo.GRADIENT, task.stage + 1, task.micro_batch, source, own)
    return None


def message_made_by(task: Task, plan: PipelineSchedule) -> StageMessage | None:
    """Returns the message with what a task has computed, or None if it is used on its rank."""
    own = plan.ranks_of_stages[task.stage]
    if task.phase is PipelinePhase.FORWARD and task.stage < plan.stages - 1:
        target = plan.ranks_of_stages[task.stage + 1]
        return None if target == own else StageMessage(Cargo.ACTIVATION, task.stage, task.micro_batch, own, target)
    if task.phase in (PipelinePhase.BACKWARD, PipelinePhase.INPUT) and task.stage > 0:
        target = plan.ranks_of_stages[task.stage - 1]
        return None if target == own else StageMessage(Cargo.GRADIENT, task.stage, task.micro_batch, own, target)
    return None


def program_of(plan: PipelineSchedule, posted_ahead: int = 1) -> PipelineProgram:
    """Returns the plan with its messages.

    Args:
        posted_ahead: how many messages a rank posts before it needs them. With 1 a message arrives while the rank
            computes what comes before. With 0 a rank posts a message only when it is the next thing that it waits for:
            no post stands in the way of anything else, so that such a program ends even where messages of a rank
            block one another.
    """
    return PipelineProgram(plan, tuple(_of_rank(order, plan, posted_ahead) for order in plan.orders))


def _of_rank(order: tuple[Task, ...], plan: PipelineSchedule, posted_ahead: int) -> tuple[Step, ...]:
    wanted = [message for task in order if (message := message_needed_by(task, plan)) is not None]
    steps: list[Step] = [StageTransfer(Action.POST, message) for message in wanted[:posted_ahead]]
    taken = 0
    for task in order:
        message = message_needed_by(task, plan)
        if message is not None:
            steps += [
                StageTransfer(Action.POST, each) for each in wanted[taken + posted_ahead : taken + posted_ahead + 1]
            ]
            steps.append(StageTransfer(Action.AWAIT, message))
            taken += 1
        steps.append(task)
        if (result := message_made_by(task, plan)) is not None:
            steps.append(StageTransfer(Action.SEND, result))
    return tuple(steps)


class PipelineFaultError(Exception):
    """A pipeline's plan or program is wrong."""


@dataclass(frozen=True)
class VerifiedProgram:
    """What was found of a program that is right.

    Attributes:
        most_kept: for each rank, of how many micro-batches and stages it keeps activations at most.
    """

    most_kept: tuple[int, ...]


def verify_program(program: PipelineProgram, blocks: bool = False) -> VerifiedProgram:
    """Checks that a program is complete, keeps every dependence, passes each message once, and ends.

    Args:
        blocks: whether messages block one another: each rank then carries its sends out one after the other, and its
            receives one after the other, in the order in which it started them, and a send ends only when it is
            received. Paceline's messages do not, those of some other libraries do. A program that ends under this
            rule has no receive that is posted too early.

    Raises:
        PipelineFaultError: it does not; the message names the task or message, and for a hang what each rank waits for.
    """
    plan = program.plan
    _require_all_tasks(plan)
    _require_all_messages(program)
    _run(program, blocks)
    return VerifiedProgram(tuple(_most_kept(order) for order in plan.orders))


def _require_all_tasks(plan: PipelineSchedule) -> None:
    counted = Counter(task for order in plan.orders for task in order)
    for stage, rank in enumerate(plan.ranks_of_stages):
        for micro_batch in range(plan.micro_batches):
            forward, backward, of_input, weight = (Task(stage, micro_batch, phase) for phase in PipelinePhase)
            for task in (forward, backward, of_input, weight):
                if counted[task] > 1:
                    raise PipelineFaultError(f"{plan.name}: task {task} is there {counted[task]} times")
                if counted[task] and task not in plan.orders[rank]:
                    raise PipelineFaultError(f"{plan.name}: task {task} is not on rank {rank}, which has its stage")
            whole, parts = counted[backward], (counted[of_input], counted[weight])
            if not counted[forward] or (whole, parts) not in ((1, (0, 0)), (0, (1, 1))):
                raise PipelineFaultError(
                    f"{plan.name}: stage {stage} needs a forward and a backward of micro-batch {micro_batch}; there "
                    f"are {counted[forward]} forwards, {whole} backwards, and {parts[0]} and {parts[1]} parts of one"
                )
    strangers = [t for t in counted if t.stage >= plan.stages or t.micro_batch >= plan.micro_batches]
    if strangers:
        raise PipelineFaultError(f"{plan.name}: task {strangers[0]} belongs to no stage or micro-batch")


def _require_all_messages(program: PipelineProgram) -> None:
    plan = program.plan
    for rank, steps in enumerate(program.steps):
        done = Counter(step for step in steps if isinstance(step, StageTransfer))
        tasks = [step for step in steps if isinstance(step, Task)]
        wanted = Counter(transfer for task in tasks for transfer in _transfers(task, plan))
        if tuple(tasks) != plan.orders[rank]:
            raise PipelineFaultError(f"{plan.name}: rank {rank} computes other tasks than the plan says")
        for transfer in (done - wanted) + (wanted - done):
            raise PipelineFaultError(
                f"{plan.name}: rank {rank} has '{transfer.action.value}' {done[transfer]} times for "
                f"{transfer.message}; it needs it {wanted[transfer]} times"
            )


def _transfers(task: Task, plan: PipelineSchedule) -> list[StageTransfer]:
    """Returns what a rank must do with messages for a task."""
    taken, result = message_needed_by(task, plan), message_made_by(task, plan)
    before = [] if taken is None else [StageTransfer(Action.POST, taken), StageTransfer(Action.AWAIT, taken)]
    return before if result is None else [*before, StageTransfer(Action.SEND, result)]


class _Rank:
    """Where a rank is in its program, with the messages that it has started and that are not over."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.at = 0
        self.sends: deque[StageMessage] = deque()
        self.receives: deque[StageMessage] = deque()

    @property
    def next(self) -> Step | None:
        return self.steps[self.at] if self.at < len(self.steps) else None


def _run(program: PipelineProgram, blocks: bool) -> None:
    """Lets all ranks go as far as they can, in any order: what is possible once stays possible."""
    plan, ranks = program.plan, [_Rank(steps) for steps in program.steps]
    computed: set[Task] = set()
    arrived: set[StageMessage] = set()
    moves = True
    while moves:
        moves = False
        for rank in ranks:
            while (step := rank.next) is not None and _is_possible(step, plan, computed, arrived):
                if isinstance(step, Task):
                    computed.add(step)
                elif step.action is Action.SEND:
                    rank.sends.append(step.message)
                elif step.action is Action.POST:
                    rank.receives.append(step.message)
                rank.at += 1
                moves = True
        moves = _deliver(ranks, arrived, blocks) or moves
    stuck = [f"rank {number} at {_said(rank.next)}" for number, rank in enumerate(ranks) if rank.next is not None]
    if stuck:
        raise PipelineFaultError(f"{plan.name}: the ranks wait for one another: {'; '.join(stuck)}")


def _deliver(ranks: list[_Rank], arrived: set[StageMessage], blocks: bool) -> bool:
    """Has messages arrive that are sent and posted; with `blocks`, those that are the first on both ranks."""
    before = len(arrived)
    for rank in ranks:
        for message in list(rank.sends)[: 1 if blocks else None]:
            receives = ranks[message.target].receives
            if message in list(receives)[: 1 if blocks else None]:
                rank.sends.remove(message)
                receives.remove(message)
                arrived.add(message)
    return len(arrived) > before


def _is_possible(step: Step, plan: PipelineSchedule, computed: set[Task], arrived: set[StageMessage]) -> bool:
    if isinstance(step, StageTransfer):
        return step.action is not Action.AWAIT or step.message in arrived
    missing = [task for task in _before(step, plan) if not any(each in computed for each in task)]
    if missing and all(plan.ranks_of_stages[t.stage] == plan.ranks_of_stages[step.stage] for t in missing[0]):
        raise PipelineFaultError(f"{plan.name}: task {step} comes before {missing[0][0]} on its own rank")
    message = message_needed_by(step, plan)
    if message is not None and message not in arrived:
        raise PipelineFaultError(f"{plan.name}: task {step} does not wait for {message}")
    return True


def _before(task: Task, plan: PipelineSchedule) -> list[tuple[Task, ...]]:
    """Returns what must be computed before a task, each as alternatives; other ranks' tasks are known by messages."""
    stage, micro_batch = task.stage, task.micro_batch
    if task.phase is PipelinePhase.WEIGHT:
        return [(Task(stage, micro_batch, PipelinePhase.INPUT),)]
    own: list[tuple[Task, ...]] = []
    if task.phase is not PipelinePhase.FORWARD:
        own.append((Task(stage, micro_batch, PipelinePhase.FORWARD),))
    if message_needed_by(task, plan) is not None:
        return own
    if task.phase is PipelinePhase.FORWARD and stage > 0:
        own.append((Task(stage - 1, micro_batch, PipelinePhase.FORWARD),))
    if task.phase is not PipelinePhase.FORWARD and stage < plan.stages - 1:
        own.append(
            (Task(stage + 1, micro_batch, PipelinePhase.BACKWARD), Task(stage + 1, micro_batch, PipelinePhase.INPUT))
        )
    return own


def _most_kept(order: tuple[Task, ...]) -> int:
    kept = most = 0
    for task in order:
        kept += task.phase is PipelinePhase.FORWARD
        most = max(most, kept)
        kept -= task.phase in (PipelinePhase.BACKWARD, PipelinePhase.WEIGHT)
    return most


def _said(step: Step | None) -> str:
    return str(step) if isinstance(step, Task) else f"{step.action.value} {step.message}" if step else "its end"


UNIT: Mapping[PipelinePhase, float] = {
    PipelinePhase.FORWARD: 1.0,
    PipelinePhase.INPUT: 1.0,
    PipelinePhase.WEIGHT: 1.0,
    PipelinePhase.BACKWARD: 2.0,
}
"""A forward as long as either half of a backward, which is about right for layers of matrices."""


@dataclass(frozen=True)
class PipelineTiming:
    """When the tasks of a plan are carried out, in seconds from the first one's beginning.

    Attributes:
        begins: when each task begins, and `ends` when it is over.
        busy: for how long each rank computes.
    """

    begins: Mapping[Task, float]
    ends: Mapping[Task, float]
    busy: tuple[float, ...]

    @property
    def length(self) -> float:
        """How long the step takes."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """For which share of the step the ranks wait, on average."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.length)


def simulate(
    plan: PipelineSchedule,
    times: Mapping[PipelinePhase, float] | Callable[[Task], float] = UNIT,
    message_s: float = 0.0,
) -> PipelineTiming:
    """Returns when everything happens.

    Args:
        times: how long each phase takes, or a function that says it for each task.
        message_s: how long after the end of a task its result is on another rank.
    """
    lasts: Callable[[Task], float] = times if callable(times) else lambda task: times[task.phase]
    begins: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    free = [0.0] * plan.ranks
    waiting = [list(reversed(order)) for order in plan.orders]
    while any(waiting):
        before = len(ends)
        for rank, order in enumerate(waiting):
            while order and (ready := _ready(order[-1], plan, ends, message_s)) is not None:
                task = order.pop()
                begins[task] = max(free[rank], ready)
                free[rank] = ends[task] = begins[task] + lasts(task)
        if len(ends) == before:
            raise ValueError(f"the plan {plan.name} hangs; see paceline.train.pipeline.program.verify_program")
    busy = tuple(sum(ends[task] - begins[task] for task in order) for order in plan.orders)
    return PipelineTiming(begins, ends, busy)


def _ready(task: Task, plan: PipelineSchedule, ends: Mapping[Task, float], message_s: float) -> float | None:
    """Returns when a task has what it needs; None if that is not known yet."""
    message = message_needed_by(task, plan)
    travels = 0.0 if message is None else message_s
    if task.phase is PipelinePhase.WEIGHT:
        return ends.get(Task(task.stage, task.micro_batch, PipelinePhase.INPUT))
    if task.phase is PipelinePhase.FORWARD:
        if task.stage == 0:
            return 0.0
        end = ends.get(Task(task.stage - 1, task.micro_batch, PipelinePhase.FORWARD))
        return None if end is None else end + travels
    own = ends.get(Task(task.stage, task.micro_batch, PipelinePhase.FORWARD))
    if task.stage == plan.stages - 1 or own is None:
        return own
    later = Task(task.stage + 1, task.micro_batch, PipelinePhase.BACKWARD)
    end = ends.get(later, ends.get(Task(task.stage + 1, task.micro_batch, PipelinePhase.INPUT)))
    return None if end is None else max(own, end + travels)
