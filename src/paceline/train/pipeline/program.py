"""PipelineSchedule: the order of each rank's computations as data; PipelineProgram: a schedule with its messages.

Functions create well-known schedules:

| name | source |
| --- | --- |
| `gpipe` | Huang et al. 2019, "GPipe": all forward passes, then all backward passes |
| `1f1b` | Narayanan et al. 2019, "PipeDream", without its stale weights: alternating forward and backward passes |
| `interleaved` | Narayanan et al. 2021, "Efficient Large-Scale Language Model Training": several stages per rank |
| `zero_bubble` | Qi et al. 2023, "Zero Bubble Pipeline Parallelism", schedule ZB-H1 |

`verify_program` proves that a program computes all tasks in an order that cannot hang, and counts the activations that
each rank keeps. `simulate` computes the duration of a schedule from the durations of tasks and messages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class PipelinePhase(Enum):
    """A computation on a micro-batch in a stage.

    BACKWARD comprises INPUT and WEIGHT, which zero-bubble schedules execute separately.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the gradient of the stage's input, which the previous stage needs
    WEIGHT = "W"  # the gradients of the stage's weights, which no other stage needs


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One phase of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    phase: PipelinePhase

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The computations of each rank in a step."""

    name: str
    ranks_of_stages: tuple[int, ...]  # for each stage, the rank that computes it
    micro_batches: int  # the number of micro-batches per batch
    orders: tuple[tuple[Task, ...], ...]  # for each rank, its tasks in the order of execution

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks_of_stages)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.orders)


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a schedule that runs all forward passes first, and therefore keeps all activations."""
    _require_single(stages_per_rank, "gpipe")
    return _one_stage_per_rank("gpipe", micro_batches, [micro_batches] * ranks)


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a schedule in which rank r keeps the activations of at most `ranks - r` micro-batches."""
    _require_single(stages_per_rank, "1f1b")
    return _one_stage_per_rank("1f1b", micro_batches, [min(ranks - 1 - rank, micro_batches) for rank in range(ranks)])


def _one_stage_per_rank(name: str, micro_batches: int, ahead: list[int]) -> PipelineSchedule:
    """Creates a schedule in which rank r alternates between the phases after its first `ahead[r]` forward passes."""
    orders = []
    for rank, first in enumerate(ahead):
        forwards = [Task(rank, number, PipelinePhase.FORWARD) for number in range(micro_batches)]
        backwards = [Task(rank, number, PipelinePhase.BACKWARD) for number in range(micro_batches)]
        orders.append(_alternated(forwards, backwards, first))
    return PipelineSchedule(name, tuple(range(len(ahead))), micro_batches, tuple(orders))


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Creates a schedule in which rank r computes the stages r, r + ranks, r + 2 ranks and so on."""
    if micro_batches % ranks:
        raise ValueError(
            f"pipeline: the interleaved schedule needs a multiple of {ranks} micro-batches, one for each rank; "
            f"there are {micro_batches}"
        )
    each_phase = micro_batches * stages_per_rank
    orders = []
    for rank in range(ranks):

        def nth(number: int, is_forward: bool, rank: int = rank) -> Task:
            round_, within = divmod(number, ranks * stages_per_rank)
            chunk, micro_batch = divmod(within, ranks)
            chunk = chunk if is_forward else stages_per_rank - 1 - chunk
            phase = PipelinePhase.FORWARD if is_forward else PipelinePhase.BACKWARD
            return Task(chunk * ranks + rank, round_ * ranks + micro_batch, phase)

        ahead = min(2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks, each_phase)
        forwards = [nth(number, True) for number in range(each_phase)]
        backwards = [nth(number, False) for number in range(each_phase)]
        orders.append(_alternated(forwards, backwards, ahead))
    placed = tuple(stage % ranks for stage in range(ranks * stages_per_rank))
    return PipelineSchedule("interleaved", placed, micro_batches, tuple(orders))


def zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a 1F1B schedule in which weight gradients are deferred to a rank's idle time.

    The schedule keeps no more activations than 1F1B. Rank r defers the weight gradients of r micro-batches.
    """
    _require_single(stages_per_rank, "zero_bubble")
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [Task(rank, number, PipelinePhase.FORWARD) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                order.append(Task(rank, ahead + number, PipelinePhase.FORWARD))
            order.append(Task(rank, number, PipelinePhase.INPUT))
            if number >= rank:
                order.append(Task(rank, number - rank, PipelinePhase.WEIGHT))
        deferred = range(max(0, micro_batches - rank), micro_batches)
        order += [Task(rank, number, PipelinePhase.WEIGHT) for number in deferred]
        orders.append(tuple(order))
    return PipelineSchedule("zero_bubble", tuple(range(ranks)), micro_batches, tuple(orders))


def forwards_only(plan: PipelineSchedule) -> PipelineSchedule:
    """Returns a schedule that contains only the forward passes of `plan`, in the same order."""
    orders = tuple(tuple(task for task in order if task.phase is PipelinePhase.FORWARD) for order in plan.orders)
    return PipelineSchedule(f"{plan.name}, forwards only", plan.ranks_of_stages, plan.micro_batches, orders)


SCHEDULES: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def make_pipeline_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """Creates the schedule named `name`; raises ValueError if the name or another argument is not supported."""
    if name not in SCHEDULES:
        raise ValueError(f"pipeline: unknown schedule {name!r}; the schedules are {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise ValueError(f"pipeline: {what} is {number}; it must be at least 1")
    return SCHEDULES[name](ranks, micro_batches, stages_per_rank)


def _alternated(forwards: list[Task], backwards: list[Task], ahead: int) -> tuple[Task, ...]:
    """Returns `ahead` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    later: Iterable[Task] = forwards[ahead:]
    turns = [task for pair in zip(later, backwards, strict=False) for task in pair]
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])


def _require_single(stages_per_rank: int, name: str) -> None:
    if stages_per_rank != 1:
        raise ValueError(
            f"pipeline: the schedule {name!r} has one stage per rank, not {stages_per_rank}; use 'interleaved'"
        )


class MessageContent(Enum):
    """The kind of content in a message."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A message between two stages on different ranks.

    An activation is the output of the sending `stage`; a gradient is the gradient of its input. `source` and `target`
    are ranks.
    """

    content: MessageContent
    stage: int
    micro_batch: int
    source: int
    target: int

    def __str__(self) -> str:
        made = "of stage" if self.content is MessageContent.ACTIVATION else "of the input of stage"
        return f"the {self.content.value} {made} {self.stage}, micro-batch {self.micro_batch}"


class Action(Enum):
    """The operation that a rank performs on a message."""

    SEND = "send"  # start sending the result of the previous task
    POST = "post"  # start receiving the message
    AWAIT = "await"  # wait for a message that was posted


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """A step in which a rank sends a message, posts a receive, or waits for a message."""

    action: Action
    message: StageMessage


Step = Task | StageTransfer


@dataclass(frozen=True)
class PipelineProgram:
    """All tasks and transfers of all ranks in a step."""

    plan: PipelineSchedule
    steps: tuple[tuple[Step, ...], ...]  # for each rank, its tasks and transfers in order


def message_needed_by(task: Task, plan: PipelineSchedule) -> StageMessage | None:
    """Returns the message that a task needs, or None if its input is on the same rank."""
    return _message(task, task.stage - (1 if task.phase is PipelinePhase.FORWARD else -1), task.stage, plan)


def message_made_by(task: Task, plan: PipelineSchedule) -> StageMessage | None:
    """Returns the message with a task's result, or None if the result is used on the same rank or not at all."""
    return _message(task, task.stage, task.stage + (1 if task.phase is PipelinePhase.FORWARD else -1), plan)


def _message(task: Task, source: int, target: int, plan: PipelineSchedule) -> StageMessage | None:
    """Returns a task's message between two stages, or None if a stage does not exist or both are on the same rank."""
    if task.phase is PipelinePhase.WEIGHT or not (0 <= source < plan.stages and 0 <= target < plan.stages):
        return None
    content = MessageContent.ACTIVATION if task.phase is PipelinePhase.FORWARD else MessageContent.GRADIENT
    sender, receiver = plan.ranks_of_stages[source], plan.ranks_of_stages[target]
    return None if sender == receiver else StageMessage(content, source, task.micro_batch, sender, receiver)


def program_of(plan: PipelineSchedule, posted_ahead: int = 1) -> PipelineProgram:
    """Adds messages to a schedule; each rank posts `posted_ahead` receives in advance.

    With 1, a message can arrive while the rank computes earlier tasks. With 0, a rank posts a receive immediately
    before it waits for the message, and the program completes even if a rank's messages block one another.
    """
    return PipelineProgram(plan, tuple(_of_rank(order, plan, posted_ahead) for order in plan.orders))


def _of_rank(order: tuple[Task, ...], plan: PipelineSchedule, posted_ahead: int) -> tuple[Step, ...]:
    wanted = [message for task in order if (message := message_needed_by(task, plan)) is not None]
    steps: list[Step] = [StageTransfer(Action.POST, message) for message in wanted[:posted_ahead]]
    taken = 0
    for task in order:
        message = message_needed_by(task, plan)
        if message is not None:
            ahead = taken + posted_ahead
            steps += [StageTransfer(Action.POST, later) for later in wanted[ahead : ahead + 1]]
            steps.append(StageTransfer(Action.AWAIT, message))
            taken += 1
        steps.append(task)
        if (result := message_made_by(task, plan)) is not None:
            steps.append(StageTransfer(Action.SEND, result))
    return tuple(steps)


class PipelineFaultError(Exception):
    """Raised if a pipeline's schedule or program is incorrect."""


def verify_program(program: PipelineProgram, blocks: bool = False) -> tuple[int, ...]:
    """Checks that a program contains all tasks, respects dependencies, sends each message once, and cannot hang.

    Args:
        program: the program to check.
        blocks: whether messages block one another, as in some libraries but not in Paceline. If True, each rank's sends
            complete in order, its receives complete in order, and a send completes only when it is received. A program
            that completes under these rules does not post any receive too early.

    Returns:
        For each rank, the maximum number of activations (one per micro-batch and stage) that it keeps.

    Raises:
        PipelineFaultError: a check failed. The error message identifies the task or message or, if the program hangs,
            the step at which each rank is waiting.
    """
    plan = program.plan
    _require_all_tasks(plan)
    _require_all_messages(program)
    _run(program, blocks)
    return tuple(_most_kept(order) for order in plan.orders)


def _require_all_tasks(plan: PipelineSchedule) -> None:
    counted = Counter(task for order in plan.orders for task in order)
    for stage, rank in enumerate(plan.ranks_of_stages):
        for micro_batch in range(plan.micro_batches):
            forward, backward, of_input, weight = (Task(stage, micro_batch, phase) for phase in PipelinePhase)
            for task in (forward, backward, of_input, weight):
                if counted[task] > 1:
                    raise PipelineFaultError(f"{plan.name}: task {task} occurs {counted[task]} times")
                if counted[task] and task not in plan.orders[rank]:
                    raise PipelineFaultError(f"{plan.name}: task {task} is not on rank {rank}, which has its stage")
            whole, parts = counted[backward], (counted[of_input], counted[weight])
            if not counted[forward] or (whole, parts) not in ((1, (0, 0)), (0, (1, 1))):
                raise PipelineFaultError(
                    f"{plan.name}: stage {stage} needs a forward and a backward of micro-batch {micro_batch}; there "
                    f"are {counted[forward]} forwards, {whole} backwards, and {parts[0]} and {parts[1]} parts of one"
                )
    for task in counted:
        if task.stage >= plan.stages or task.micro_batch >= plan.micro_batches:
            raise PipelineFaultError(f"{plan.name}: task {task} belongs to no stage or micro-batch")


def _require_all_messages(program: PipelineProgram) -> None:
    plan = program.plan
    for rank, steps in enumerate(program.steps):
        done = Counter(step for step in steps if isinstance(step, StageTransfer))
        tasks = [step for step in steps if isinstance(step, Task)]
        wanted = Counter(transfer for task in tasks for transfer in _transfers(task, plan))
        if tuple(tasks) != plan.orders[rank]:
            raise PipelineFaultError(f"{plan.name}: rank {rank} computes different tasks than the plan")
        for transfer in (done - wanted) + (wanted - done):
            raise PipelineFaultError(
                f"{plan.name}: rank {rank} has '{transfer.action.value}' {done[transfer]} times for "
                f"{transfer.message}; it needs it {wanted[transfer]} times"
            )


def _transfers(task: Task, plan: PipelineSchedule) -> list[StageTransfer]:
    """Returns the transfers that a task requires on its rank."""
    taken, result = message_needed_by(task, plan), message_made_by(task, plan)
    before = [] if taken is None else [StageTransfer(Action.POST, taken), StageTransfer(Action.AWAIT, taken)]
    return before if result is None else [*before, StageTransfer(Action.SEND, result)]


class _Rank:
    """A rank's progress in its program, and its messages in flight."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.position = 0
        self.sends: deque[StageMessage] = deque()
        self.receives: deque[StageMessage] = deque()

    @property
    def next(self) -> Step | None:
        return self.steps[self.position] if self.position < len(self.steps) else None


def _run(program: PipelineProgram, blocks: bool) -> None:
    """Advances all ranks as far as possible, in any order, because a step that is possible now remains possible."""
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
                rank.position += 1
                moves = True
        moves = _deliver(ranks, arrived, blocks) or moves
    stuck = [f"rank {number} at {_step_text(step)}" for number, rank in enumerate(ranks) if (step := rank.next)]
    if stuck:
        raise PipelineFaultError(f"{plan.name}: the ranks wait for each other: {'; '.join(stuck)}")


def _deliver(ranks: list[_Rank], arrived: set[StageMessage], blocks: bool) -> bool:
    """Delivers messages that were sent and posted; if `blocks`, only messages at the head of both ranks' queues."""
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
    for tasks in _dependencies(step, plan):
        if _are_on_one_rank(tasks[0], step, plan) and computed.isdisjoint(tasks):
            raise PipelineFaultError(f"{plan.name}: task {step} comes before {tasks[0]} on its own rank")
    message = message_needed_by(step, plan)
    if message is not None and message not in arrived:
        raise PipelineFaultError(f"{plan.name}: task {step} does not wait for {message}")
    return True


def _dependencies(task: Task, plan: PipelineSchedule) -> list[tuple[Task, ...]]:
    """Returns a task's dependencies. At least one task in each tuple must be complete; its tasks are in one stage."""
    stage, micro_batch = task.stage, task.micro_batch
    if task.phase is PipelinePhase.WEIGHT:
        return [(Task(stage, micro_batch, PipelinePhase.INPUT),)]
    if task.phase is PipelinePhase.FORWARD:
        return [(Task(stage - 1, micro_batch, PipelinePhase.FORWARD),)] if stage > 0 else []
    forward = (Task(stage, micro_batch, PipelinePhase.FORWARD),)
    if stage == plan.stages - 1:
        return [forward]
    later = [Task(stage + 1, micro_batch, phase) for phase in (PipelinePhase.BACKWARD, PipelinePhase.INPUT)]
    return [forward, tuple(later)]


def _are_on_one_rank(first: Task, second: Task, plan: PipelineSchedule) -> bool:
    return plan.ranks_of_stages[first.stage] == plan.ranks_of_stages[second.stage]


def _most_kept(order: tuple[Task, ...]) -> int:
    kept = most = 0
    for task in order:
        kept += task.phase is PipelinePhase.FORWARD
        most = max(most, kept)
        kept -= task.phase in (PipelinePhase.BACKWARD, PipelinePhase.WEIGHT)
    return most


def _step_text(step: Step) -> str:
    return str(step) if isinstance(step, Task) else f"{step.action.value} {step.message}"


UNIT: Mapping[PipelinePhase, float] = {
    PipelinePhase.FORWARD: 1.0,
    PipelinePhase.INPUT: 1.0,
    PipelinePhase.WEIGHT: 1.0,
    PipelinePhase.BACKWARD: 2.0,
}
"""Relative durations of the phases if a forward takes as long as each half of a backward, as for linear layers."""


@dataclass(frozen=True)
class PipelineTiming:
    """The times of a schedule's tasks, in seconds from the start of the first task."""

    begins: Mapping[Task, float]
    ends: Mapping[Task, float]
    busy: tuple[float, ...]  # for each rank, the total time that it spends computing

    @property
    def length(self) -> float:
        """The duration of the step."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The average share of the step that ranks spend waiting, from 0 to 1."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.length)


def simulate(
    plan: PipelineSchedule,
    times: Mapping[PipelinePhase, float] | Callable[[Task], float] = UNIT,
    message_s: float = 0.0,
) -> PipelineTiming:
    """Computes the times of a schedule's tasks.

    Args:
        plan: the schedule.
        times: the duration of each phase in seconds, or a function that returns the duration of a task.
        message_s: the time in seconds from the end of a task to the arrival of its result on another rank.
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
    """Returns the time at which a task's inputs are available, or None if the time cannot be computed yet."""
    ready = 0.0
    for tasks in _dependencies(task, plan):
        end = next((ends[before] for before in tasks if before in ends), None)
        if end is None:
            return None
        ready = max(ready, end if _are_on_one_rank(tasks[0], task, plan) else end + message_s)
    return ready
