"""A worker for `overhead`: runs a loop with shards (in an elastic job or not) or with a bare model, in turns."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import paceline as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elastic_cases.loops import model_and_samples, optimizer_of, with_barrier, with_shards
from elastic_cases.turns import Turn


def run(steps: Iterator[None], turn: Turn, of_a_turn: int) -> None:
    """Runs all steps, `of_a_turn` in each turn."""
    started = 0.0
    for number, _ in enumerate(steps):
        if number % of_a_turn == 0:
            if number:
                turn.report((time.perf_counter() - started) / of_a_turn)
            turn.wait()
            started = time.perf_counter()
    turn.report((time.perf_counter() - started) / of_a_turn)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--job", choices=("elastic", "plain", "barrier"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--of-a-turn", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(elastic=options.job == "elastic")
    model, samples, batch_size = model_and_samples(options.model, options.steps, options.shards)
    if options.job == "barrier":
        run(with_barrier(model, samples, batch_size), Turn(options.directory, options.job), options.of_a_turn)
        dist.destroy_process_group()
        return
    shards = dist.LogicalShards(model, options.shards)
    loader = dist.ShardLoader(samples, batch_size, shards, shuffle=False)
    optimizer = optimizer_of(model)
    turn = Turn(options.directory, options.job)
    if options.job == "elastic":
        state = dist.ElasticState(shards, optimizer=optimizer, loader=loader)
        for _ in state.epochs(1):
            run(with_shards(model, shards, loader, optimizer), turn, options.of_a_turn)
    else:
        run(with_shards(model, shards, loader, optimizer), turn, options.of_a_turn)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
