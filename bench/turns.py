"""Steps of a training that take turns on the ranks of a job, so that the machine's moods fall on all kinds alike."""

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
    """What this rank measured, by kind: the seconds of a step in each turn, and the processor time of all turns."""

    step_s: dict[str, list[float]] = field(default_factory=dict)
    processor_s: dict[str, float] = field(default_factory=dict)


def take_turns(
    kinds: dict[str, Callable[[], object]],
    steps: int,
    goes_on: Callable[[int], bool],
    *,
    alternates: bool = False,
) -> Turns:
    """Runs `steps` steps of each kind in turn, round after round; the ranks meet before each turn.

    Args:
        kinds: what runs a step of each kind.
        steps: the steps of a turn.
        goes_on: is asked with the number of rounds that are over whether there is another one.
        alternates: whether every other round takes the kinds in the reverse order.
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
    """Returns a row for each kind: n, the median and the 95th percentile of its turns, and how it compares.

    Efficiency is the median of the kind "none", if there is one, divided by that of the row; "of barrier" likewise.
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
    """The processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows_of_ranks(rank_main: Callable[..., None], ranks: int, *arguments: object) -> list[Any]:
    """Spawns `rank_main(rank, *arguments, directory)`; returns what `leave_rows` left in the directory."""
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (*arguments, directory), ranks)
        rows: list[Any] = json.loads(Path(directory, "rows.json").read_text())
    return rows


def leave_rows(rows: Sequence[object], directory: str) -> None:
    """Leaves the rows of rank 0 for `rows_of_ranks`; every rank calls it at its end."""
    import paceline as dist

    if dist.get_rank() == 0:
        Path(directory, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
