"""Shows that a program computes what it should, in an order that cannot hang, and what it keeps in memory."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from paceline.parallel.pipeline.plan import Phase, Plan, Task
from paceline.parallel.pipeline.program import Action, Message, Program, Step, Transfer, made, needed


class PipelineFaultError(Exception):
    """A pipeline's plan or program is wrong."""


@dataclass(frozen=True)
class Proved:
    """What was found of a program that is right.

    Attributes:
        most_kept: for each rank, of how many micro-batches and stages it keeps activations at most.
    """

    most_kept: tuple[int, ...]


def prove(program: Program, blocks: bool = False) -> Proved:
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
    return Proved(tuple(_most_kept(order) for order in plan.orders))


def _require_all_tasks(plan: Plan) -> None:
    counted = Counter(task for order in plan.orders for task in order)
    for stage, rank in enumerate(plan.ranks_of_stages):
        for micro_batch in range(plan.micro_batches):
            forward, backward, of_input, weight = (Task(stage, micro_batch, phase) for phase in Phase)
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


def _require_all_messages(program: Program) -> None:
    plan = program.plan
    for rank, steps in enumerate(program.steps):
        done = Counter(step for step in steps if isinstance(step, Transfer))
        tasks = [step for step in steps if isinstance(step, Task)]
        wanted = Counter(transfer for task in tasks for transfer in _transfers(task, plan))
        if tuple(tasks) != plan.orders[rank]:
            raise PipelineFaultError(f"{plan.name}: rank {rank} computes other tasks than the plan says")
        for transfer in (done - wanted) + (wanted - done):
            raise PipelineFaultError(
                f"{plan.name}: rank {rank} has '{transfer.action.value}' {done[transfer]} times for "
                f"{transfer.message}; it needs it {wanted[transfer]} times"
            )


def _transfers(task: Task, plan: Plan) -> list[Transfer]:
    """Returns what a rank must do with messages for a task."""
    taken, result = needed(task, plan), made(task, plan)
    before = [] if taken is None else [Transfer(Action.POST, taken), Transfer(Action.AWAIT, taken)]
    return before if result is None else [*before, Transfer(Action.SEND, result)]


class _Rank:
    """Where a rank is in its program, with the messages that it has started and that are not over."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.at = 0
        self.sends: deque[Message] = deque()
        self.receives: deque[Message] = deque()

    @property
    def next(self) -> Step | None:
        return self.steps[self.at] if self.at < len(self.steps) else None


def _run(program: Program, blocks: bool) -> None:
    """Lets all ranks go as far as they can, in any order: what is possible once stays possible."""
    plan, ranks = program.plan, [_Rank(steps) for steps in program.steps]
    computed: set[Task] = set()
    arrived: set[Message] = set()
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


def _deliver(ranks: list[_Rank], arrived: set[Message], blocks: bool) -> bool:
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


def _is_possible(step: Step, plan: Plan, computed: set[Task], arrived: set[Message]) -> bool:
    if isinstance(step, Transfer):
        return step.action is not Action.AWAIT or step.message in arrived
    missing = [task for task in _before(step, plan) if not any(each in computed for each in task)]
    if missing and all(plan.ranks_of_stages[t.stage] == plan.ranks_of_stages[step.stage] for t in missing[0]):
        raise PipelineFaultError(f"{plan.name}: task {step} comes before {missing[0][0]} on its own rank")
    message = needed(step, plan)
    if message is not None and message not in arrived:
        raise PipelineFaultError(f"{plan.name}: task {step} does not wait for {message}")
    return True


def _before(task: Task, plan: Plan) -> list[tuple[Task, ...]]:
    """Returns what must be computed before a task, each as alternatives; other ranks' tasks are known by messages."""
    stage, micro_batch = task.stage, task.micro_batch
    if task.phase is Phase.WEIGHT:
        return [(Task(stage, micro_batch, Phase.INPUT),)]
    own: list[tuple[Task, ...]] = []
    if task.phase is not Phase.FORWARD:
        own.append((Task(stage, micro_batch, Phase.FORWARD),))
    if needed(task, plan) is not None:
        return own
    if task.phase is Phase.FORWARD and stage > 0:
        own.append((Task(stage - 1, micro_batch, Phase.FORWARD),))
    if task.phase is not Phase.FORWARD and stage < plan.stages - 1:
        own.append((Task(stage + 1, micro_batch, Phase.BACKWARD), Task(stage + 1, micro_batch, Phase.INPUT)))
    return own


def _most_kept(order: tuple[Task, ...]) -> int:
    kept = most = 0
    for task in order:
        kept += task.phase is Phase.FORWARD
        most = max(most, kept)
        kept -= task.phase in (Phase.BACKWARD, Phase.WEIGHT)
    return most


def _said(step: Step | None) -> str:
    return str(step) if isinstance(step, Task) else f"{step.action.value} {step.message}" if step else "its end"
