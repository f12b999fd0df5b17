"""Measures how much elasticity adds to a step without failures, and compares shards with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from report import p95

from elastic_cases.jobs import HERE, Launched
from elastic_cases.options import Options, Rows
from elastic_cases.turns import turns

_STEPS = 4  # steps per turn
_SETTLING_TURNS = 1


def measure_overhead(options: Options) -> tuple[str, Rows]:
    """Returns the table that compares the loop with shards in an elastic job to the same loop in an ordinary job."""
    rows: Rows = []
    for model in options.models:
        times: dict[str, list[float]] = {"elastic": [], "plain": [], "barrier": []}
        with contextlib.ExitStack() as opened:
            directory = opened.enter_context(tempfile.TemporaryDirectory())
            taking = opened.enter_context(turns(directory, options.workers, *times))
            for job in times:
                opened.enter_context(contextlib.closing(_launch(job, model, directory, options)))
            taking.meet()
            for number in range(_SETTLING_TURNS + options.rounds):
                for job, measured in times.items():
                    seconds = taking.take(job)
                    measured += [seconds] if number >= _SETTLING_TURNS else []
        rows.append(_compared(model, times))
    return f"a step of the shards' loop on {options.workers} workers, elastic and not", rows


def _launch(job: str, model: str, directory: str, options: Options) -> Launched:
    launcher = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(options.workers)]
    launcher += ["--elastic"] if job == "elastic" else []
    counts = {"shards": options.workers, "steps": _STEPS * (_SETTLING_TURNS + options.rounds), "of-a-turn": _STEPS}
    numbers = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    return Launched([*launcher, str(HERE / "train_in_turns.py"), directory, "--job", job, "--model", model, *numbers])


def measure_shards(options: Options) -> tuple[str, Rows]:
    """Returns the table that compares the loop with shards to the loop with DistributedDataParallel."""
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(_rank_main, (options.models, options.rounds, directory), options.workers)
        measured = json.loads(Path(directory, "result").read_text())
    rows = [_compared(model, times) for model, times in measured.items()]
    return f"a step on {options.workers} ranks: as many shards as ranks, and DistributedDataParallel", rows


def _rank_main(rank: int, models: tuple[str, ...], rounds: int, directory: str) -> None:
    import torch

    import paceline as dist
    from elastic_cases.loops import model_and_samples, optimizer_of, with_barrier, with_ddp, with_shards

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* slow each other down")  # the same for all loops
    dist.init_process_group()
    ranks = dist.get_world_size()
    steps = _STEPS * (_SETTLING_TURNS + rounds) + 1  # an iterator yields once before its first step
    measured = {}
    for name in models:
        model, samples, batch_size = model_and_samples(name, steps, ranks)
        shards = dist.LogicalShards(model, ranks)
        loader = dist.ShardLoader(samples, batch_size, shards, shuffle=False)
        other, _, _ = model_and_samples(name, steps, ranks)
        bare, _, _ = model_and_samples(name, steps, ranks)
        loops = {
            "shards": with_shards(model, shards, loader, optimizer_of(model)),
            "ddp": with_ddp(other, samples, batch_size),
            "barrier": with_barrier(bare, samples, batch_size),
        }
        for loop in loops.values():
            next(loop)
        times: dict[str, list[float]] = {kind: [] for kind in loops}
        for number in range(_SETTLING_TURNS + rounds):
            for kind, loop in loops.items():
                dist.barrier()
                started = time.perf_counter()
                for _ in range(_STEPS):
                    next(loop)
                seconds = (time.perf_counter() - started) / _STEPS
                times[kind] += [seconds] if number >= _SETTLING_TURNS else []
        measured[name] = times
    if rank == 0:
        Path(directory, "result").write_text(json.dumps(measured))
    dist.barrier()


def _columns(kind: str, times_s: list[float]) -> dict[str, float]:
    return {f"{kind} ms": 1e3 * statistics.median(times_s), f"{kind}, p95 ms": 1e3 * p95(times_s)}


def _compared(model: str, times: dict[str, list[float]]) -> dict[str, object]:
    """Returns a row with the loops' times, the ratio of the first two, and the variation of the ratio between turns."""
    (name, first), (other, second), _ = times.items()
    ratios = statistics.quantiles([a / b for a, b in zip(first, second, strict=True)], n=10, method="inclusive")
    return {
        "model": model,
        "n": _STEPS * len(first),
        **{column: value for kind, each in times.items() for column, value in _columns(kind, each).items()},
        f"{name} / {other}": statistics.median(first) / statistics.median(second),
        "ratio of a turn p10": ratios[0],
        "p90": ratios[-1],
    }
