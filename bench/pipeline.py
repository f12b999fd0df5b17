"""Compares the duration of a pipeline step with the schedule's theoretical duration and with torch's own pipelining.

    python bench/pipeline.py [--ranks 2] [--micro-batches 8] [--width 512] [--depth 8] [--rounds 7] [--json FILE]

Every rank has one thread and `depth` linear layers of `width` features with ReLU, so all stages take the same time. A
rank's own forward and backward passes are timed without messages, on all ranks at the same time. "theory" is the
duration of a step simulated from these times, and "bubble" is the share of the step in which a rank does not compute.
"step / its own tasks" is the duration of the step divided by that of a step simulated from the measured durations of
its tasks. A core that is slower for a moment lengthens both, so the excess over 1 is the cost of messages and waiting.
Steps of all schedules alternate; n is the number of turns. torch's schedules run on gloo in the same turns. A schedule
that does not complete within 30 s is reported as hanging, and all later schedules are skipped because gloo can no
longer be used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
from report import parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks

OURS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
THEIRS = {"torch GPipe": "ScheduleGPipe", "torch 1F1B": "Schedule1F1B"}
ROWS_A_MICRO_BATCH = 32


def layers(ranks: int, width: int, depth: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(ranks * depth)]


def of_torch(
    kind: str, rank: int, ranks: int, depth: int, model: list[nn.Module], micro_batches: int
) -> Callable[..., object]:
    from torch.distributed import pipelining

    own = nn.Sequential(*model[rank * depth : (rank + 1) * depth])
    stage = pipelining.PipelineStage(own, rank, ranks, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(x: torch.Tensor) -> None:
        for parameter in own.parameters():
            parameter.grad = None
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x)
        else:
            schedule.step()

    return step


def ends(step: Callable[[], object]) -> bool:
    """Returns True if a step over gloo completes before gloo's timeout."""
    try:
        step()
    except RuntimeError:
        return False
    return True


@contextmanager
def each_task_timed(stages: Iterable[object]) -> Iterator[list[float]]:
    """Yields a list, and appends the duration of each task that the stages run within the context."""
    took: list[float] = []

    def timed(work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            started = time.perf_counter()
            result = work(*arguments)
            took.append(time.perf_counter() - started)
            return result

        return call

    with ExitStack() as patches:
        for stage in stages:
            for phase in ("forward", "backward", "weight"):
                patches.enter_context(mock.patch.object(stage, phase, timed(getattr(stage, phase))))
        yield took


def rank_main(rank: int, options: dict[str, int], with_torch: bool, directory: str) -> None:
    import paceline as dist
    from paceline.train.pipeline.program import PipelinePhase, PipelineSchedule, Task, simulate

    torch.set_num_threads(1)
    dist.init_process_group()
    ranks, width, depth, parts = dist.get_world_size(), options["width"], options["depth"], options["micro_batches"]
    x = torch.randn(parts * ROWS_A_MICRO_BATCH, width)
    pipelines = {
        name: dist.Pipeline(
            layers(ranks, width, depth),
            nn.functional.mse_loss,
            micro_batches=parts,
            schedule=name,
            stages_per_rank=each,
        )
        for name, each in OURS.items()
    }

    took_in_step: list[float] = []

    def ours(pipeline: dist.Pipeline) -> None:
        pipeline.zero_grad()
        with each_task_timed(pipeline._stages.values()) as took:
            pipeline.step(x, x)
        took_in_step[:] = took

    hanging: list[dict[str, object]] = []
    kinds: dict[str, Callable[[], object]] = {name: lambda p=p: ours(p) for name, p in pipelines.items()}
    if with_torch:
        import torch.distributed as torch_dist

        rendezvous = f"file://{directory}/rendezvous"
        torch_dist.init_process_group("gloo", rendezvous, timedelta(seconds=30), rank=rank, world_size=ranks)
        model = layers(ranks, width, depth)
        for name, kind in THEIRS.items():
            step = partial(of_torch(kind, rank, ranks, depth, model, parts), x)
            is_over = torch.tensor(ends(step))
            dist.all_reduce(is_over, dist.ReduceOp.BAND)
            if not is_over:
                hanging.append({"schedule": name, "n": 0, "outcome": "hangs"})
                break
            kinds[name] = step

    def work(name: str) -> dict[PipelinePhase, float]:
        """Returns the duration of each phase of a micro-batch on this rank."""
        spent = dict.fromkeys(PipelinePhase, 0.0)
        pipeline = pipelines[name]
        small = torch.randn(ROWS_A_MICRO_BATCH, width)
        is_split = name == "zero_bubble"
        for task in pipeline.plan.orders[rank]:
            stage = pipeline._stages[task.stage]
            started = time.perf_counter()
            if task.phase is PipelinePhase.FORWARD:
                stage.forward(task.micro_batch, (small.requires_grad_(task.stage > 0),), None, is_split)
            elif task.phase is PipelinePhase.WEIGHT:
                stage.weight(task.micro_batch)
            else:
                stage.backward(task.micro_batch, (small.detach(),))
            spent[task.phase] += time.perf_counter() - started
        tasks = len(pipeline._stages) * parts
        return {phase: seconds / tasks for phase, seconds in spent.items()}

    def of_everyone(seconds: Sequence[float]) -> list[torch.Tensor]:
        own = torch.tensor(seconds, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(everyone, own)
        return everyone

    def as_measured(plan: PipelineSchedule) -> dict[Task, float]:
        """Returns the duration of each task in the latest step."""
        return {
            task: float(seconds)
            for order, times in zip(plan.orders, of_everyone(took_in_step), strict=True)
            for task, seconds in zip(order, times, strict=True)
        }

    def lasts(plan: PipelineSchedule, everyone: list[torch.Tensor], task: Task) -> float:
        return float(everyone[plan.ranks_of_stages[task.stage]][list(PipelinePhase).index(task.phase)])

    times: dict[str, list[float]] = {name: [] for name in kinds}
    alone: dict[str, list[tuple[float, float, float]]] = {name: [] for name in OURS}
    for turn in range(options["rounds"] + 1):
        for name, step in kinds.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            took = time.perf_counter() - started
            if turn:
                times[name].append(took)
            if name not in OURS:
                continue
            plan = pipelines[name].plan
            own = simulate(plan, as_measured(plan).__getitem__)
            pipelines[name].zero_grad()
            dist.barrier()
            theory = simulate(plan, partial(lasts, plan, of_everyone(list(work(name).values()))))
            if turn:
                alone[name].append((theory.length, sum(theory.busy) / ranks, own.length))
    rows = hanging
    for name, seconds in times.items():
        row: dict[str, object] = {"schedule": name, "n": len(seconds), "p50 ms": statistics.median(seconds) * 1e3}
        row["p95 ms"] = sorted(seconds)[int(0.95 * (len(seconds) - 1))] * 1e3
        if name in OURS:
            both = list(zip(seconds, alone[name], strict=True))
            row["theory ms"] = statistics.median(length for length, *_ in alone[name]) * 1e3
            row["step / theory"] = statistics.median(took / length for took, (length, *_) in both)
            row["step / its own tasks"] = statistics.median(took / own for took, (_, _, own) in both)
            row["bubble in theory"] = statistics.median(1 - busy / length for length, busy, _ in alone[name])
            row["bubble"] = statistics.median(1 - busy / took for took, (_, busy, _) in both)
        rows.append(row)
    leave_rows(rows if rank == 0 else [], directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    for name, default in (("ranks", 2), ("micro-batches", 8), ("width", 512), ("depth", 8), ("rounds", 7)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--no-torch", action="store_true", help="skip torch's own pipelining")
    options = arguments.parse_args()
    numbers = {name: getattr(options, name) for name in ("micro_batches", "width", "depth", "rounds")}
    rows = rows_of_ranks(rank_main, options.ranks, numbers, not options.no_torch)
    show(f"A pipeline of {options.ranks} ranks and {options.micro_batches} micro-batches", rows, options.json)


if __name__ == "__main__":
    main()
