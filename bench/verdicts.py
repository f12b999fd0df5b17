"""When a job hangs or fails, are the right rank and the right cause named, and how soon?

    python bench/verdicts.py [--runs 5] [--faults skip stop ...] [--ranks 2 4] [--hosts 1 2] [--stall-after 15]
                             [--healthy 5] [--busy-for 25] [--torch] [--show] [--json FILE]

Each run makes one fault in the last rank of a small training loop, and judges the sentences that the launcher prints.
In healthy runs rank 0 evaluates, saves or compiles for longer than a call may last; a sentence that says something is
wrong is a false verdict. Two hosts are network namespaces, which need root. With --torch, torch's flight recorder and
its analyzer look at the same faults, on gloo: there it only counts whether the rank was named.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from report import parser, show
from verdict_cases.faults import FAULTS, HEALTHY, Fault, is_accused
from verdict_cases.jobs import paceline, torchs


def faulty(fault: Fault, ranks: int, hosts: int, runs: int, stall_after_s: float, shows: bool) -> dict[str, object]:
    """Returns a row for a class of faults."""
    bad, right, times = ranks - 1, 0, []
    for _ in range(runs):
        said = paceline(fault.name, ranks, hosts, stall_after_s, lambda text: fault.is_right(text, bad))
        right += fault.is_right(said.text, bad)
        if said.after_s is not None and not fault.at_the_end:
            times.append(said.after_s)
        if shows:
            print(said.text, flush=True)
    row: dict[str, object] = {"fault": fault.name, "ranks": ranks, "hosts": hosts, "right": f"{right} of {runs}"}
    return {**row, "median s": statistics.median(times) if times else None, "longest s": max(times, default=None)}


def of_torch(fault: Fault, ranks: int, runs: int, shows: bool) -> str:
    """Returns how often torch's analyzer named the rank."""
    right = 0
    for _ in range(runs):
        text = torchs(fault.name, ranks).text
        right += Fault(fault.name, fault.torchs).is_right(text, ranks - 1)
        if shows:
            print(text, flush=True)
    return f"{right} of {runs}"


def healthy(kind: str, ranks: int, hosts: int, runs: int, stall_after_s: float, busy_s: float) -> dict[str, object]:
    """Returns a row for healthy runs."""
    accused, told = 0, 0
    for _ in range(runs):
        text = paceline(f"healthy-{kind}-{busy_s}", ranks, hosts, stall_after_s, lambda _: False).text
        accused += is_accused(text)
        told += "the job goes on" in text
    row: dict[str, object] = {"healthy": kind, "ranks": ranks, "hosts": hosts, "runs": runs}
    return {**row, "false verdicts": accused, "told that others wait": told}


def main() -> None:
    """Runs what is asked for, and prints the tables."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--faults", nargs="*", default=[fault.name for fault in FAULTS])
    arguments.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments.add_argument("--hosts", type=int, nargs="*", default=[1, 2])
    arguments.add_argument("--stall-after", type=float, default=15.0)
    arguments.add_argument("--healthy", type=int, default=5)
    arguments.add_argument("--busy-for", type=float, default=25.0)
    arguments.add_argument("--torch", action="store_true")
    arguments.add_argument("--show", action="store_true", help="print what was said")
    options = arguments.parse_args()
    rows = []
    for fault in (each for each in FAULTS if each.name in options.faults):
        for hosts in (each for each in options.hosts if not fault.hosts or each in fault.hosts):
            for ranks in options.ranks:
                stall_after_s = 0.3 if fault.at_the_end else options.stall_after
                row = faulty(fault, ranks, hosts, options.runs, stall_after_s, options.show)
                if options.torch and hosts == 1 and not fault.at_the_end:
                    row["torch names the rank"] = of_torch(fault, ranks, options.runs, options.show)
                rows.append(row)
    if rows:
        show("The right rank and cause, by classes of faults", rows, options.json)
    if options.healthy:
        rows = [
            healthy(kind, ranks, hosts, options.healthy, options.stall_after, options.busy_for)
            for kind in HEALTHY
            for hosts in options.hosts
            for ranks in options.ranks
        ]
        show("False verdicts in healthy runs", rows, options.json and f"{options.json}.healthy")


if __name__ == "__main__":
    main()
