"""Runs several kinds of training steps alternately, so that changes in the machine's load affect all kinds equally."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import columns_of, spread


@dataclass
class Turns:
    """This rank's measurements by kind: the seconds of a step in each turn, and the processor time of all turns."""

    step_s: dict[str, list[float]] = field(default_factory=dict)
    processor_s: dict[str, float] = field(default_factory=dict)


def take_turns(
    kinds: dict[str, Callable[[], object]],
    steps: int,
    goes_on: Callable[[int], bool],
    *,
    alternates: bool = False,
) -> Turns:
    """Runs `steps` steps of each kind, round after round. A barrier precedes each turn.

    Args:
        kinds: For each kind, a function that runs one step.
        steps: The number of steps in a turn.
        goes_on: A function that returns True if another round is to run, given the number of completed rounds.
        alternates: True if every other round runs the kinds in reverse order.
    """
    import paceline as dist

    turns = Turns({kind: [] for kind in kinds}, dict.fromkeys(kinds, 0.0))
    rounds = 0
    while goes_on(rounds):
        for kind in reversed(kinds) if alternates and rounds % 2 else kinds:
            dist.barrier()
            started, used_before = time.perf_counter(), processor_seconds()
            for _ in range(steps):
                kinds[kind]()
            turns.step_s[kind].append((time.perf_counter() - started) / steps)
            turns.processor_s[kind] += processor_seconds() - used_before
        rounds += 1
    return turns


def rows_of_steps(times_s: dict[str, list[float]], of_a_turn: int) -> list[dict[str, object]]:
    """Returns a row for each kind: n, the median and the 95th percentile of its turns, and its efficiency.

    Efficiency is the median of the kind "none", if present, divided by the row's median. "of barrier" is the same ratio
    for the kind "barrier".
    """
    spreads = {kind: spread(each, of_a_turn) for kind, each in times_s.items()}
    rows: list[dict[str, object]] = []
    for kind, each in spreads.items():
        row: dict[str, object] = {"step": kind, **columns_of(each, "ms")}
        for column, baseline in (("efficiency", "none"), ("of barrier", "barrier")):
            if baseline in spreads:
                row[column] = spreads[baseline]["p50_s"] / each["p50_s"]
        rows.append(row)
    return rows


def processor_seconds() -> float:
    """Returns the processor time that this process has used, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows_of_ranks(rank_main: Callable[..., None], ranks: int, *arguments: object) -> list[Any]:
    """Spawns `rank_main(rank, *arguments, directory)`; returns the rows that `leave_rows` wrote to the directory."""
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (*arguments, directory), ranks)
        rows: list[Any] = json.loads(Path(directory, "rows.json").read_text())
    return rows


def leave_rows(rows: Sequence[object], directory: str) -> None:
    """Writes the rows of rank 0 for `rows_of_ranks`; every rank must call this before it exits."""
    import paceline as dist

    if dist.get_rank() == 0:
        Path(directory, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
