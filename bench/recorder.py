"""Measures the time that the recorder adds to a call, an all-reduce and a training step.

    python bench/recorder.py [--rounds N] [--json FILE]

Each row is measured with the recorder and without it, alternating in the same processes. p50 and p95 are computed over
the rounds, and n is the number of calls. Two ranks run with one thread each; the cost of a call is measured in a group
of one rank, which has no other rank to wait for. "step, barrier" is the bare model with a barrier after the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from ddp import build, stepper
from report import Spread, human, parser, seconds_per_call, show, spread
from turns import leave_rows, rows_of_ranks

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
MODELS = ["wide MLP", "200 tiny layers"]


def in_turns(call: Callable[[], object], calls: int, rounds: int, meet: Callable[[], object]) -> tuple[Spread, Spread]:
    """Returns the seconds per call with the recorder and without it. A barrier precedes each measurement."""
    from paceline import _core

    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        is_off = bool(number % 2)
        meet()
        _core.pause_recording(is_off)
        times[not is_off].append(seconds_per_call(call, calls))
        meet()
        _core.pause_recording(False)
    return spread(times[True], calls), spread(times[False], calls)


def steps_of(name: str, wraps: bool) -> Callable[[], None]:
    import paceline as dist

    torch.manual_seed(0)
    model, x = build(name)
    return stepper(dist.DistributedDataParallel(model), x) if wraps else stepper(model, x, dist.barrier)


def rank_main(rank: int, ranks: int, rounds: int, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    rows = []

    def measure(what: str, call: Callable[[], object], calls: int) -> None:
        for _ in range(3):
            call()
        rows.append((what, *in_turns(call, calls, rounds, dist.barrier)))

    if ranks == 1:
        small = torch.zeros(1)
        measure("all_reduce of 4 B, 1 rank", lambda: dist.all_reduce(small), 20_000)
        span = dist.span("bench")

        def enter_and_leave() -> None:
            with span:
                pass

        measure("span", enter_and_leave, 20_000)
        measure("log of one number", lambda: dist.log(loss=0.5), 20_000)
    else:
        for nbytes in SIZES:
            tensor = torch.zeros(nbytes // 4)
            calls = max(5, min(2000, (64 << 20) // max(nbytes, 1 << 15)))
            measure(f"all_reduce of {human(nbytes)}", lambda tensor=tensor: dist.all_reduce(tensor), calls)
        for name in MODELS:
            measure(f"DDP step, {name}", steps_of(name, True), 5)
            measure(f"step, barrier, {name}", steps_of(name, False), 5)
    leave_rows(rows, directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    for ranks in (1, 2):
        for what, on, off in rows_of_ranks(rank_main, ranks, ranks, options.rounds):
            rows.append(
                {
                    "what": what,
                    "n": on["n"],
                    "with µs": 1e6 * on["p50_s"],
                    "with, p95 µs": 1e6 * on["p95_s"],
                    "without µs": 1e6 * off["p50_s"],
                    "without, p95 µs": 1e6 * off["p95_s"],
                    "difference ns": 1e9 * (on["p50_s"] - off["p50_s"]),
                    "difference %": 100 * (on["p50_s"] / off["p50_s"] - 1),
                }
            )
    show("the cost of the recorder", rows, options.json)


if __name__ == "__main__":
    main()
