"""Checks whether the launcher reports the right rank and cause when a job hangs or fails, and how soon.

    python bench/verdicts.py [--runs 5] [--faults skip stop ...] [--ranks 2 4] [--hosts 1 2] [--stall-after 15]
                             [--healthy 5] [--busy-for 25] [--at-once 1] [--torch] [--show] [--json FILE]

Each run injects one fault into the last rank of a small training loop, and checks the sentences that the launcher
prints. In healthy runs, rank 0 evaluates, saves or compiles for longer than a call may take; a sentence that reports a
problem is a false verdict. Two hosts are network namespaces, which require root. With --torch, torch's flight recorder
and its analyzer are applied to the same faults, on gloo; only the rank that the analyzer reports is checked.

Most runs spend their time waiting, so --at-once runs several in parallel. Runs that need the whole machine (slow cores
and links, and the fault that exhausts the memory) are sequential. Without the option, times are those of an otherwise
idle machine.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from report import keep, load, p95, parser, show
from verdict_cases.faults import FAULTS, HEALTHY, Fault, is_accused
from verdict_cases.jobs import Said, paceline, torchs


@dataclass(frozen=True)
class Case:
    """A class of faults on a number of ranks and hosts."""

    fault: Fault
    ranks: int
    hosts: int

    def run(self, stall_after_s: float) -> Said:
        """Injects the fault once, and waits for the right sentence."""
        patience_s = 0.3 if self.fault.at_the_end else stall_after_s
        return paceline(self.fault.name, self.ranks, self.hosts, patience_s, self.is_right)

    def is_right(self, text: str) -> bool:
        """Returns True if the right rank and cause were reported."""
        return self.fault.is_right(text, self.ranks - 1)

    def row(self, said: Sequence[Said]) -> dict[str, object]:
        """Returns the row of the table for the runs so far."""
        right = sum(self.is_right(each.text) for each in said)
        times = [each.after_s for each in said if each.after_s is not None and not self.fault.at_the_end]
        row: dict[str, object] = {"fault": self.fault.name, "ranks": self.ranks, "hosts": self.hosts}
        row |= {"runs": len(said), "right": right}
        p50_s, p95_s = (statistics.median(times), p95(times)) if times else (None, None)
        return {**row, "median s": p50_s, "p95 s": p95_s, "longest s": max(times, default=None)}


def made(cases: Sequence[Case], options: Namespace) -> list[dict[str, object]]:
    """Runs each fault the requested number of times; returns a row for each case."""

    def run(case: Case) -> Said:
        said = case.run(options.stall_after)
        if options.show:
            mark = "right" if case.is_right(said.text) else "WRONG"
            print(f"== {case.fault.name}, {case.ranks} ranks, {case.hosts} hosts: {mark}\n{said.text}", flush=True)
        return said

    runs: dict[Case, list[Said]] = {}
    for at_once, chosen in (
        (options.at_once, [case for case in cases if not case.fault.is_alone]),
        (1, [case for case in cases if case.fault.is_alone]),
    ):
        turns = chosen * options.runs
        with ThreadPoolExecutor(at_once) as threads:
            for case, said in zip(turns, threads.map(run, turns), strict=True):
                runs.setdefault(case, []).append(said)
    rows = {case: case.row(runs[case]) for case in cases}
    if options.torch:
        for case, right in of_torch(cases, options).items():
            rows[case]["torch names the rank"] = right
    return list(rows.values())


def of_torch(cases: Sequence[Case], options: Namespace) -> dict[Case, int]:
    """Returns how often torch's analyzer reported the right rank, for the faults that it can analyze."""

    def run(case: Case) -> bool:
        text = torchs(case.fault.name, case.ranks).text
        if options.show:
            print(f"== torch, {case.fault.name}, {case.ranks} ranks:\n{text}", flush=True)
        return Fault(case.fault.name, case.fault.torchs).is_right(text, case.ranks - 1)

    chosen = [case for case in cases if case.hosts == 1 and not case.fault.is_alone]
    turns = chosen * options.runs
    with ThreadPoolExecutor(options.at_once) as threads:
        right = list(threads.map(run, turns))
    return {case: sum(was for each, was in zip(turns, right, strict=True) if each == case) for case in chosen}


def healthy(cases: Sequence[tuple[str, int, int]], options: Namespace) -> list[dict[str, object]]:
    """Returns a row for the healthy runs of each kind, on a number of ranks and hosts."""

    def run(case: tuple[str, int, int]) -> str:
        kind, ranks, hosts = case
        said = paceline(f"healthy-{kind}-{options.busy_for}", ranks, hosts, options.stall_after, lambda _: False).text
        if options.show:
            print(f"== healthy, {kind}, {ranks} ranks, {hosts} hosts:\n{said}", flush=True)
        return said

    turns = list(cases) * options.healthy
    texts: dict[tuple[str, int, int], list[str]] = {}
    with ThreadPoolExecutor(options.at_once) as threads:
        for case, text in zip(turns, threads.map(run, turns), strict=True):
            texts.setdefault(case, []).append(text)
    return [
        {
            "healthy": kind,
            "ranks": ranks,
            "hosts": hosts,
            "runs": len(said),
            "false verdicts": sum(map(is_accused, said)),
            "told that others wait": sum("the job continues" in text for text in said),
        }
        for (kind, ranks, hosts), said in texts.items()
    ]


def main() -> None:
    """Runs the selected cases, and prints the tables."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--faults", nargs="*", default=[fault.name for fault in FAULTS])
    arguments.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments.add_argument("--hosts", type=int, nargs="*", default=[1, 2])
    arguments.add_argument("--stall-after", type=float, default=15.0)
    arguments.add_argument("--healthy", type=int, default=5)
    arguments.add_argument("--busy-for", type=float, default=25.0)
    arguments.add_argument("--at-once", type=int, default=1, help="number of concurrent runs")
    arguments.add_argument("--torch", action="store_true")
    arguments.add_argument("--show", action="store_true", help="print the launcher's messages")
    options = arguments.parse_args()
    cases = [
        Case(fault, ranks, hosts)
        for fault in FAULTS
        if fault.name in options.faults
        for hosts in options.hosts
        if not fault.hosts or hosts in fault.hosts
        for ranks in options.ranks
    ]
    before = load()
    tables: dict[str, tuple[str, list[dict[str, object]]]] = {}
    if cases and options.runs:
        tables["faults"] = "The right rank and cause, by classes of faults", made(cases, options)
    if options.healthy:
        kinds = [(kind, ranks, hosts) for kind in HEALTHY for hosts in options.hosts for ranks in options.ranks]
        tables["healthy"] = "False verdicts in healthy runs", healthy(kinds, options)
    for title, rows in tables.values():
        show(title, rows, None)
    if options.json:
        kept = [{"case": case, "title": title, "rows": rows} for case, (title, rows) in tables.items()]
        keep(kept, options.json, f"The load average was {before} at the beginning and {load()} at the end.")


if __name__ == "__main__":
    main()
