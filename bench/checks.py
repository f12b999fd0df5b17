"""Measures the time that the checks of gradients and replicas add to a training step.

    python bench/checks.py [--ranks 2] [--models NAME ...] [--seconds 20] [--json FILE]

The same model is trained with the default checks and without checks, alternating every few steps in the same processes.
"barrier" is the bare model followed by a barrier after the backward pass. n is the number of steps; p50 and p95 are
computed over the turns. "cost" is the step time with checks divided by the step time without checks, minus one (the
median over turns). "looks" is the share of the total step time that the checks take, as measured by the checks
themselves. They keep this share below 0.5% once they have measured a step.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from ddp import MODELS, build
from report import parser, show
from turns import leave_rows, rows_of_ranks, rows_of_steps, take_turns

TURN_STEPS = 10
SETTLING_STEPS = 20  # enough steps for each check to run once or twice, and for the checks to measure a step


def stepper(model: torch.nn.Module, x: torch.Tensor, before: Callable[[], object] = int) -> Callable[[], None]:
    # a learning rate of 0, because diverging replicas would be checked more often
    optimizer = torch.optim.Adam(model.parameters(), 0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        before()
        optimizer.step()

    return step


class Timed:
    """Measures the total time spent in selected methods of an object."""

    def __init__(self, of: object, names: tuple[str, ...]) -> None:
        self.total_s = 0.0
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            started = time.perf_counter()
            method(*args)
            self.total_s += time.perf_counter() - started

        return timed


def is_before(end_s: float, rounds: int) -> bool:
    """Returns True if rank 0's clock has not reached `end_s`, or if no round has run yet. This is a collective call."""
    import paceline as dist

    goes_on = torch.tensor(float(rounds == 0 or time.perf_counter() <= end_s))
    dist.broadcast(goes_on, 0)
    return bool(goes_on.item())


def rank_main(rank: int, names: list[str], seconds: float, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    rows: list[dict[str, object]] = []
    for name in names:
        torch.manual_seed(rank)
        model, x = build(name)
        skips = name == "unused"
        kinds = {"with": True, "without": False}
        wrapped = {
            kind: dist.DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=skips, checks=checks)
            for kind, checks in kinds.items()
        }
        steps = {kind: stepper(each, x) for kind, each in wrapped.items()}
        steps["barrier"] = stepper(copy.deepcopy(model), x, dist.barrier)
        for step in steps.values():
            for _ in range(SETTLING_STEPS):
                step()
        looks = Timed(wrapped["with"]._checks, ("look", "end"))
        started = time.perf_counter()
        times = take_turns(steps, TURN_STEPS, partial(is_before, started + seconds), alternates=True).step_s
        ratios = [mine / other for mine, other in zip(times["with"], times["without"], strict=True)]
        costs = {
            "cost %": 100 * (statistics.median(ratios) - 1),
            "looks %": 100 * looks.total_s / (TURN_STEPS * sum(times["with"])),
        }
        rows += [
            {"model": name, **row, **(costs if row["step"] == "with" else {})}
            for row in rows_of_steps(times, TURN_STEPS)
        ]
    leave_rows(rows, directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--seconds", type=float, default=20, help="training time of each model, in seconds")
    options = arguments.parse_args()
    rows = rows_of_ranks(rank_main, options.ranks, options.models, options.seconds)
    show(f"A training step on {options.ranks} ranks of one thread, with checks and without", rows, options.json)


if __name__ == "__main__":
    main()
